//! Instructions by the processor's trap flag: each one raises SIGTRAP when it is done, and the handler adds it.

use anyhow::Result;

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub fn count(work: &mut dyn FnMut()) -> Result<u64> {
    use std::arch::asm;
    use std::sync::atomic::{AtomicU64, Ordering};

    static STEPS: AtomicU64 = AtomicU64::new(0);
    extern "C" fn add(_: libc::c_int) {
        STEPS.fetch_add(1, Ordering::Relaxed);
    }

    // SAFETY: the handler touches an atomic and nothing else.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = add as extern "C" fn(libc::c_int) as libc::sighandler_t;
        if libc::sigaction(libc::SIGTRAP, &action, std::ptr::null_mut()) != 0 {
            return Err(std::io::Error::last_os_error().into());
        }
    }
    let before = STEPS.load(Ordering::Relaxed);
    // SAFETY: the flags are as they were but for the trap flag, which the kernel hides from the handler and restores
    // behind it; asm! without nostack may push.
    unsafe { asm!("pushfq", "or qword ptr [rsp], 0x100", "popfq") };
    super::loops::counted(work);
    // SAFETY: as above.
    unsafe { asm!("pushfq", "and qword ptr [rsp], -0x101", "popfq") };
    Ok(STEPS.load(Ordering::Relaxed) - before)
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
pub fn count(_: &mut dyn FnMut()) -> Result<u64> {
    anyhow::bail!("single steps are counted on x86-64 Linux")
}

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests {
    use super::*;
    use std::arch::asm;

    #[test]
    fn nops_are_counted() {
        let mut few = || unsafe { asm!("nop", "nop") };
        let mut many = || unsafe { asm!(".rept 102", "nop", ".endr") };
        assert_eq!(count(&mut many).unwrap() - count(&mut few).unwrap(), 100);
    }
}
