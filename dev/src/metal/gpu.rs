//! The shaders on the GPU of a Mac: the same launches that run on the CPU elsewhere.
//!
//! Buffers are copied to the GPU's memory and back, so that a test sees what a kernel wrote and nothing else. The order of
//! lanes and strict mode are the CPU's alone.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::{self, NonNull};

use anyhow::{anyhow, ensure, Context, Result};
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSError, NSString};
use objc2_metal::{
    MTLBuffer, MTLCommandBuffer, MTLCommandEncoder, MTLCommandQueue, MTLComputeCommandEncoder, MTLComputePipelineState,
    MTLCreateSystemDefaultDevice, MTLDataType, MTLDevice, MTLFunction, MTLFunctionConstantValues, MTLGPUFamily,
    MTLLibrary, MTLResourceOptions, MTLSize,
};

use super::library::{Argument, Counts, Launch};

// MTLCreateSystemDefaultDevice finds nothing where CoreGraphics is not part of the process.
#[link(name = "CoreGraphics", kind = "framework")]
extern "C" {}

type Object<T> = Retained<ProtocolObject<T>>;

pub struct GpuLibrary {
    device: Object<dyn MTLDevice>,
    queue: Object<dyn MTLCommandQueue>,
    library: Object<dyn MTLLibrary>,
    /// By kernel and function constants.
    pipelines: RefCell<HashMap<String, Object<dyn MTLComputePipelineState>>>,
}

fn describe(error: Retained<NSError>) -> anyhow::Error {
    anyhow!("{}", error.localizedDescription())
}

fn size(n: [u32; 3]) -> MTLSize {
    MTLSize { width: n[0] as usize, height: n[1] as usize, depth: n[2] as usize }
}

/// The name of the GPU, or why the kernels cannot run on it.
///
/// They need simdgroup sums and matrices, which every GPU since the M1 has. Virtual machines, hosted CI runners among
/// them, show a paravirtual device of an older family.
pub fn usable() -> Result<String> {
    let device = MTLCreateSystemDefaultDevice().context("this machine has no GPU that Metal knows")?;
    let name = device.name().to_string();
    ensure!(
        device.supportsFamily(MTLGPUFamily::Apple7),
        "the kernels need a GPU of family Apple7 (M1 or later), and {name} is not one: run this on a Mac, not in a virtual machine"
    );
    Ok(name)
}

impl GpuLibrary {
    pub fn new(source: &str) -> Result<GpuLibrary> {
        let device = MTLCreateSystemDefaultDevice().context("this machine has no GPU that Metal knows")?;
        let queue = device.newCommandQueue().context("Metal returned no command queue")?;
        let library = device.newLibraryWithSource_options_error(&NSString::from_str(source), None);
        let library = library.map_err(describe).context("Metal does not compile the shader")?;
        Ok(GpuLibrary { device, queue, library, pipelines: RefCell::default() })
    }

    fn pipeline(&self, launch: &Launch) -> Result<Object<dyn MTLComputePipelineState>> {
        let key = format!("{} {:?}", launch.kernel, launch.constants);
        if let Some(found) = self.pipelines.borrow().get(&key) {
            return Ok(found.clone());
        }
        let name = NSString::from_str(launch.kernel);
        let general = self.library.newFunctionWithName(&name).context("there is no such kernel")?;
        let values = MTLFunctionConstantValues::new();
        for constant in general.functionConstantsDictionary().allValues().iter() {
            let index = constant.index();
            let &(_, value) = launch
                .constants
                .iter()
                .find(|&&(i, _)| i == index as i64)
                .with_context(|| format!("function constant {} is not set", constant.name()))?;
            let (int, flag) = (value as i32, value != 0.0);
            let (at, kind) = match constant.r#type() {
                MTLDataType::Bool => (NonNull::from(&flag).cast::<c_void>(), MTLDataType::Bool),
                _ => (NonNull::from(&int).cast::<c_void>(), MTLDataType::Int),
            };
            // SAFETY: a value of that type, which is copied; the index is the function's own.
            unsafe { values.setConstantValue_type_atIndex(at, kind, index) };
        }
        let function = self.library.newFunctionWithName_constantValues_error(&name, &values).map_err(describe)?;
        let made = self.device.newComputePipelineStateWithFunction_error(&function).map_err(describe)?;
        self.pipelines.borrow_mut().insert(key, made.clone());
        Ok(made)
    }

    fn buffer(&self, bytes: &[u8]) -> Result<Object<dyn MTLBuffer>> {
        // No buffer is empty.
        let buffer = self
            .device
            .newBufferWithLength_options(bytes.len().max(16), MTLResourceOptions::StorageModeShared)
            .context("the GPU has no memory for a buffer")?;
        // SAFETY: as long as the slice at least, and nobody else's.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.contents().as_ptr().cast(), bytes.len()) };
        Ok(buffer)
    }

    pub fn launch(&self, mut launch: Launch) -> Result<Counts> {
        let pipeline = self.pipeline(&launch).with_context(|| launch.kernel.to_string())?;
        let threads: u32 = launch.group.iter().product();
        ensure!(
            threads as usize <= pipeline.maxTotalThreadsPerThreadgroup(),
            "{}: {threads} threads in a threadgroup, the GPU runs {} of this kernel",
            launch.kernel,
            pipeline.maxTotalThreadsPerThreadgroup()
        );
        let mut buffers = Vec::new();
        for argument in &launch.buffers {
            buffers.push(match argument {
                Argument::Read(bytes) => self.buffer(bytes)?,
                Argument::Write(bytes) => self.buffer(bytes)?,
            });
        }
        let commands = self.queue.commandBuffer().context("Metal returned no command buffer")?;
        let encoder = commands.computeCommandEncoder().context("Metal returned no encoder")?;
        encoder.setComputePipelineState(&pipeline);
        for (i, buffer) in buffers.iter().enumerate() {
            // SAFETY: the buffer lives until the end of this function, which waits for the GPU.
            unsafe { encoder.setBuffer_offset_atIndex(Some(buffer), 0, i) };
        }
        for (i, &bytes) in launch.threadgroup.iter().enumerate() {
            // SAFETY: an index that the kernel declares.
            unsafe { encoder.setThreadgroupMemoryLength_atIndex(bytes.next_multiple_of(16), i) };
        }
        encoder.dispatchThreadgroups_threadsPerThreadgroup(size(launch.grid), size(launch.group));
        encoder.endEncoding();
        commands.commit();
        commands.waitUntilCompleted();
        if let Some(error) = commands.error() {
            return Err(describe(error)).with_context(|| launch.kernel.to_string());
        }
        for (argument, buffer) in launch.buffers.iter_mut().zip(&buffers) {
            if let Argument::Write(bytes) = argument {
                // SAFETY: as long as the slice at least; the GPU is done with it.
                unsafe { ptr::copy_nonoverlapping(buffer.contents().as_ptr().cast(), bytes.as_mut_ptr(), bytes.len()) };
            }
        }
        Ok(Counts::default())
    }
}
