//! An implementation in another process.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use super::protocol::{Implementation, Reply, Request, line, parse};

/// A program that speaks the protocol. Started at the first request, and again after it died.
pub struct Shim {
    command: String,
    patience: Duration,
    process: Option<Process>,
}

struct Process {
    child: Child,
    input: ChildStdin,
    output: Receiver<std::io::Result<String>>,
}

impl Shim {
    /// Returns the program that `command` starts, by the shell, with `patience` for each answer.
    pub const fn new(command: String, patience: Duration) -> Self {
        Self { command, patience, process: None }
    }

    fn process(&mut self) -> Result<&mut Process, String> {
        if self.process.is_none() {
            self.process =
                Some(Process::start(&self.command).map_err(|error| format!("`{}`: {error}", self.command))?);
        }
        self.process.as_mut().ok_or_else(|| "not started".to_string())
    }
}

impl Implementation for Shim {
    fn ask(&mut self, request: &Request) -> Result<Vec<Reply>, String> {
        let patience = self.patience;
        let answer = self.process()?.ask(&line(request)?, patience);
        if answer.is_err() {
            // Its state is unknown now.
            self.process = None;
        }
        answer
    }
}

impl Process {
    fn start(command: &str) -> std::io::Result<Self> {
        let mut child = Command::new("sh")
            .args(["-c", &format!("exec {command}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(std::io::Error::other("no pipes"));
        };
        let (lines, received) = channel();
        std::thread::spawn(move || BufReader::new(output).lines().try_for_each(|line| lines.send(line)));
        Ok(Self { child, input, output: received })
    }

    fn ask(&mut self, request: &str, patience: Duration) -> Result<Vec<Reply>, String> {
        let ended = |what: &dyn std::fmt::Display| format!("the implementation ended ({what}) at: {request}");
        writeln!(self.input, "{request}").and_then(|()| self.input.flush()).map_err(|error| ended(&error))?;
        let mut replies = Vec::new();
        loop {
            let line = match self.output.recv_timeout(patience) {
                Ok(line) => line.map_err(|error| ended(&error))?,
                Err(RecvTimeoutError::Timeout) => {
                    return Err(format!("no answer within {patience:?} to: {request}"));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(ended(&"its output was closed")),
            };
            let reply: Reply = parse(&line)?;
            let ends = reply.ends();
            replies.push(reply);
            if ends {
                return Ok(replies);
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _it_may_be_gone_already = self.child.kill();
        let _status = self.child.wait();
    }
}
