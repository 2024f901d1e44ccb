//! Our own implementation, `rdma-proto`, behind the [`protocol`](super::protocol).

use std::io::{BufRead, Write};
use std::time::Duration;

use rdma_proto::wire::{FeatureSet, Message};
use rdma_proto::{Action, Config, Error, InvalidMessage, Keepalive, RegionAddress};
use rdma_types::time::Instant;
use rdma_types::{CompletionError, CompletionStatus, Immediate};

use super::data::{Blame, Bytes, Hex, Phase, Reason, Settings};
use super::protocol::{Implementation, Reply, Request, VERSION, line, parse, shown};
use suite::Role;

/// Our implementation. Requests and answers pass through text, like another's.
#[derive(Default)]
pub struct Ours {
    machine: Option<Machine>,
}

struct Machine {
    connection: rdma_proto::Machine,
    now: Instant,
    /// Ids of signalled requests that have not completed.
    posted: Vec<u64>,
}

impl Implementation for Ours {
    fn ask(&mut self, request: &Request) -> Result<Vec<Reply>, String> {
        self.answer(&line(request)?)?.iter().map(|line| parse(line)).collect()
    }
}

impl Ours {
    /// Serves requests from `input` to `output` until the end.
    ///
    /// # Errors
    /// Reading or writing fails, or a line is not a request.
    pub fn serve(&mut self, input: impl BufRead, mut output: impl Write) -> std::io::Result<()> {
        for request in input.lines() {
            for reply in self.answer(&request?).map_err(std::io::Error::other)? {
                writeln!(output, "{reply}")?;
            }
            output.flush()?;
        }
        Ok(())
    }

    fn answer(&mut self, request: &str) -> Result<Vec<String>, String> {
        let replies = match parse(request)? {
            Request::Hello { .. } => vec![Reply::Hello {
                name: "rdma-proto".to_string(),
                version: env!("CARGO_PKG_VERSION").to_string(),
                protocol: VERSION,
            }],
            Request::Decode { hex } => vec![decode(&hex)],
            Request::Encode { fields } => {
                vec![Reply::Bytes { hex: Bytes(Message::from(fields).encode().to_vec()) }]
            }
            Request::Start { role, settings, .. } => {
                let machine = Machine::new(role, &settings)?;
                let reply = machine.where_it_stands();
                self.machine = Some(machine);
                vec![reply]
            }
            event => self.machine.as_mut().ok_or("an event without a connection")?.take(event)?,
        };
        replies.iter().map(line).collect()
    }
}

fn decode(Bytes(bytes): &Bytes) -> Reply {
    match Message::decode(bytes) {
        Ok(message) => Reply::Message { fields: message.into() },
        Err(InvalidMessage::UnknownOpcode { .. }) => Reply::Invalid { reason: Reason::Opcode },
        Err(_) => Reply::Invalid { reason: Reason::Length },
    }
}

impl Machine {
    fn new(role: Role, settings: &Settings) -> Result<Self, String> {
        let time = |ms| (ms > 0).then(|| Duration::from_millis(ms));
        let base = match role {
            Role::Client => Config::client(),
            Role::Server => Config::server(),
        };
        let config = base
            .window(settings.window)
            .windows(settings.windows)
            .send_buffer(settings.send_buffer)
            .send_depth(settings.send_depth)
            .peer_receives(settings.peer_receives)
            .window_limit(settings.window_limit)
            .features(FeatureSet(settings.features.0))
            .negotiate(settings.negotiate)
            .keepalive(Some(
                Keepalive::NONE.every(time(settings.keepalive_ms)).limit(time(settings.silence_ms)),
            ))
            .stall_limit(time(settings.stall_ms));
        let region = |Hex(address), Hex(rkey)| RegionAddress { address, rkey: rkey as u32 };
        let regions = [region(settings.address, settings.rkey), region(settings.address2, settings.rkey2)];
        let connection = rdma_proto::Machine::new(config, regions).map_err(|error| error.to_string())?;
        Ok(Self { connection, now: Instant::default(), posted: Vec::new() })
    }

    fn take(&mut self, event: Request) -> Result<Vec<Reply>, String> {
        let (connection, now) = (&mut self.connection, self.now);
        let mut replies = Vec::new();
        match event {
            Request::Established { rnr_retry } => connection.handle_established(now, rnr_retry),
            Request::Receive { hex } => connection.handle_message(now, &hex.0),
            Request::Immediate { value } => connection.handle_immediate(now, Immediate(value)),
            Request::Write { length } => self.write(length)?,
            Request::Read { length } => self.read(length)?,
            Request::Acknowledged => {
                for id in std::mem::take(&mut self.posted) {
                    self.connection.handle_sent(now, id);
                }
            }
            Request::Failed { status } => {
                connection.handle_failure(CompletionError { status: status_of(&status)?, vendor: 0 });
            }
            Request::Disconnected => connection.handle_disconnected(),
            Request::Advance { ms } => self.advance(ms, &mut replies),
            Request::Close { within_ms } => connection.close(now, Duration::from_millis(within_ms)),
            other => return Err(format!("not an event: {}", shown(&other))),
        }
        self.act(&mut replies);
        replies.push(self.where_it_stands());
        Ok(replies)
    }

    fn write(&mut self, mut length: u32) -> Result<(), String> {
        while length > 0 {
            let part = length.min(self.connection.space().len);
            if part == 0 {
                return Err("the send buffer of this trace is too small for it".to_string());
            }
            // Refused after a close and after the end.
            if self.connection.commit(part as usize).is_err() {
                return Ok(());
            }
            length -= part;
        }
        Ok(())
    }

    fn read(&mut self, mut length: u32) -> Result<(), String> {
        while let Some(readable) = self.connection.readable().filter(|_| length > 0) {
            let part = length.min(readable.len);
            self.connection.consume(part).map_err(|error| error.to_string())?;
            length -= part;
        }
        Ok(())
    }

    /// Advances time, and handles everything that is due meanwhile.
    fn advance(&mut self, ms: u64, replies: &mut Vec<Reply>) {
        let until = self.now.after(Duration::from_millis(ms));
        while let Some(due) = self.connection.next_timeout().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            self.connection.handle_timeout(self.now);
            self.act(replies);
        }
        self.now = until;
    }

    fn act(&mut self, replies: &mut Vec<Reply>) {
        while let Some(action) = self.connection.poll_action(|| self.now) {
            replies.push(match action {
                Action::Send { id, signaled, message, .. } => {
                    self.posted.extend(signaled.then_some(id));
                    Reply::Send { hex: Bytes(message.to_vec()) }
                }
                Action::Write { id, signaled, from, to, immediate } => {
                    self.posted.extend(signaled.then_some(id));
                    Reply::Write {
                        address: Hex(to.address),
                        rkey: Hex(to.rkey.into()),
                        length: from.len(),
                        immediate: immediate.map(|immediate| immediate.0),
                    }
                }
                Action::Disconnect => Reply::Disconnect,
            });
        }
    }

    const fn where_it_stands(&self) -> Reply {
        let (state, blame) = match self.connection.state() {
            rdma_proto::State::Connecting => (Phase::Connecting, None),
            rdma_proto::State::Open => (Phase::Open, None),
            rdma_proto::State::Closing => (Phase::Closing, None),
            rdma_proto::State::Closed => (Phase::Closed, None),
            rdma_proto::State::Failed(error) => (Phase::Failed, Some(blame(&error))),
        };
        Reply::Ok { state, unread: self.connection.unread(), unsent: self.connection.unposted(), blame }
    }
}

const fn blame(error: &Error) -> Blame {
    match error {
        Error::InvalidMessage(_) => Blame::InvalidMessage,
        Error::PeerMisbehaved(_) => Blame::PeerMisbehaved,
        Error::PeerIncompatible(_) => Blame::PeerIncompatible,
        Error::Transport(_) => Blame::Transport,
        _ => Blame::Other,
    }
}

pub(super) fn status_of(name: &str) -> Result<CompletionStatus, String> {
    [
        CompletionStatus::LOC_LEN_ERR,
        CompletionStatus::WR_FLUSH_ERR,
        CompletionStatus::REM_ACCESS_ERR,
        CompletionStatus::RETRY_EXC_ERR,
        CompletionStatus::RNR_RETRY_EXC_ERR,
    ]
    .into_iter()
    .find(|status| format!("{status:?}") == name)
    .ok_or_else(|| format!("no trace may name the status {name}"))
}
