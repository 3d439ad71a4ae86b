//! Exit codes: 0 done, 1 a gate failed, 2 a usage or input error, 3 the machine lacks what the command needs.

use std::process::ExitCode;

use serde_json::json;

/// A gate said no: the command did its work, and the answer is negative.
pub const GATE_FAILED: u8 = 1;
/// The arguments or an input file are wrong.
pub const INPUT: u8 = 2;
/// The machine lacks what the command needs.
pub const MACHINE: u8 = 3;
/// Ended by Ctrl-C, as shells count it (128 + SIGINT).
pub const INTERRUPTED: u8 = 130;

/// The reader of standard output went away, as shells count it (128 + SIGPIPE).
pub const BROKEN_PIPE: u8 = 141;

/// The command was ended by Ctrl-C before it had a result.
#[derive(Debug)]
pub struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted; nothing half-written was left behind")
    }
}

impl std::error::Error for Interrupted {}

/// Prints an error and says with which code to exit. The chain of causes is one line; with `--json` it is an object on
/// standard output, so that a caller finds it where it looks for results.
pub fn report(error: &anyhow::Error, json: bool) -> ExitCode {
    let code = code_of(error);
    let message = messages(error).join(": ");
    if json {
        crate::outln!("{}", json!({"error": message, "exit_code": code}));
    }
    crate::errln!("error: {message}");
    ExitCode::from(code)
}

/// The messages of the chain. A library error prints its cause itself; a cause that the line already ends with is left out.
fn messages(error: &anyhow::Error) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for cause in error.chain() {
        let text = cause.to_string();
        if !out.last().is_some_and(|last| last.ends_with(&text)) {
            out.push(text);
        }
    }
    out
}

/// A cause as an error of a bake, in a box where another one of them carries it.
fn bake_error<'a>(cause: &'a (dyn std::error::Error + 'static)) -> Option<&'a bake::Error> {
    cause.downcast_ref().or_else(|| cause.downcast_ref::<Box<bake::Error>>().map(|b| &**b))
}

fn code_of(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if cause.is::<Interrupted>()
            || matches!(bake_error(cause), Some(bake::Error::Cancelled { .. }))
            || matches!(cause.downcast_ref(), Some(ppl::Error::Cancelled))
        {
            return INTERRUPTED;
        }
        if matches!(cause.downcast_ref(), Some(runtime::Error::Threads { .. }))
            || matches!(cause.downcast_ref(), Some(kernels::device::DeviceError::Unavailable(_)))
        {
            return MACHINE;
        }
    }
    INPUT
}
