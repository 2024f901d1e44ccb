//! Finds a password in what a program prints.

use std::fmt::{Debug, Display};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// No other value contains it.
pub(crate) const PASSWORD: &str = "hunter2";

#[track_caller]
pub(crate) fn hidden(what: &str, text: &str) {
    assert!(!text.contains(PASSWORD), "{what} prints the password: {text}");
}

#[track_caller]
pub(crate) fn debug(what: &str, value: &impl Debug) {
    hidden(what, &format!("{value:?}"));
    hidden(what, &format!("{value:#?}"));
}

#[track_caller]
pub(crate) fn error(what: &str, error: &(impl std::error::Error + 'static)) {
    let mut next: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = next {
        told(what, &error);
        next = error.source();
    }
}

#[track_caller]
fn told(what: &str, value: &(impl Debug + Display)) {
    debug(what, value);
    hidden(what, &value.to_string());
}

/// What all threads of this process log, at every level.
static LOGGED: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Log;

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        logged().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn logged() -> MutexGuard<'static, Vec<u8>> {
    LOGGED.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn log() {
    let logging = tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_writer(|| Log);
    // Another test of this process may have done it.
    let _kept = logging.try_init();
}

/// Looks for it in what was logged.
#[track_caller]
pub(crate) fn hidden_in_the_log() {
    hidden("the log", &String::from_utf8_lossy(&logged()));
}
