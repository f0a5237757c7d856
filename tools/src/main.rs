use std::process::ExitCode;

use clap::Parser;
use kv::cli;

fn main() -> ExitCode {
    match cli::dispatch(cli::Arguments::parse().verb) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}
