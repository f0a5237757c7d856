//! The instruction counts of the inner loops against tests/counts.

use anyhow::Result;

use super::{Options, Tally};
use crate::counts::{self, Record, Way};
use kv::progress::Spinner;

const WHAT: &str = "instruction counts";

pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    let plans = match counts::plans() {
        Ok(plans) => plans,
        Err(why) => {
            tally.skip(WHAT, 1, &why);
            return Ok(());
        }
    };
    let compiler = counts::rustc()?;
    let mut record = Record::read(&counts::file())?;
    let mut both = false;
    for plan in plans {
        let way = match plan.way {
            Ok(_) if !options.bless_counts && !record.has(&compiler, plan.isa) => Err(format!(
                "tests/counts has none of it by {compiler} (it is of {}): --bless-counts takes these",
                record.compilers()
            )),
            // Eight microseconds an instruction.
            Ok(Way::Step) if options.quick => Err("not in --quick: single steps take a minute".into()),
            Ok(_) if options.quick && plan.isa == "scalar" => Err("not in --quick: it takes half a minute".into()),
            way => way,
        };
        let way = match way {
            Ok(way) => way,
            Err(why) => {
                let what = format!("{WHAT}, {}", plan.isa);
                match why.as_str() {
                    counts::NO_VALGRIND => tally.missing(&what, &why),
                    _ => tally.skip(&what, 1, &why),
                }
                continue;
            }
        };
        both |= plan.isa == "avx2" && way == Way::Callgrind;
        tally.check(&format!("{WHAT}, {} by {}", plan.isa, way.name()), || {
            let _spinner = Spinner::new(&format!("counting instructions, {}", plan.isa));
            let now = counts::count(plan.isa, way, "")?;
            if !options.bless_counts {
                return record.compare(&compiler, plan.isa, &now);
            }
            record.bless(&compiler, plan.isa, &now);
            record.write(&counts::file())
        });
    }
    if both && !options.quick {
        tally.check(&format!("{WHAT}, callgrind and single steps agree"), counts::cross_check);
    }
    Ok(())
}
