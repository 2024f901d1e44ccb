//! Describes requests and completions in words.

use std::io;

use rdma_backend::{Backend, CmEventKind, CompletionStatus};
use rdma_proto::wire::{Message, Window};

use super::recording::{Op, Outcome, Remote, Request};

/// The last window that one end's peer announced, and the bytes written since a notification.
#[derive(Clone, Copy, Debug)]
pub struct Direction {
    window: Option<Window>,
    /// Bytes written since the last immediate, if all of these writes are known.
    written: Option<u64>,
}

impl Default for Direction {
    fn default() -> Self {
        Self { window: None, written: Some(0) }
    }
}

impl Direction {
    /// Handles a request of the peer, which may announce a window.
    pub fn announced(&mut self, request: &Request) {
        if let (Op::Send, Ok(Message::RegisterXferMemory(window))) =
            (request.op, Message::decode(&request.bytes.0))
        {
            self.window = Some(window);
        }
    }

    /// Handles missing entries, which may have announced a window, or written bytes.
    pub const fn missed(&mut self) {
        *self = Self { window: None, written: None };
    }

    /// Describes a request, and any mistake in it.
    pub fn request(&mut self, request: &Request) -> String {
        let (Op::Write, Some(remote)) = (request.op, request.remote) else { return self::request(request) };
        let written = self.written.map(|written| written.saturating_add(request.len as u64));
        self.written = if request.immediate.is_some() { Some(0) } else { written };
        let Some(window) = self.window else { return self::request(request) };
        let mut text = format!("WRITE {} bytes {}", request.len, place(window, remote, request.len as u64));
        if let Some(immediate) = request.immediate {
            text += &format!(", imm {immediate}");
            if let Some(written) = written.filter(|written| *written != u64::from(immediate)) {
                text += &format!(" [{written} bytes were written]");
            }
        }
        text
    }
}

fn place(window: Window, remote: Remote, len: u64) -> String {
    let Window { address, length, rkey } = window;
    let offset = remote.address.checked_sub(address).filter(|offset| *offset <= length.into());
    let Some(offset) = offset else {
        let outside = || format!("-> {:#x} [outside the window]", remote.address);
        return if len == 0 { "nowhere".into() } else { outside() };
    };
    let end = offset.saturating_add(len);
    let mut text = format!("at {offset} of {length}");
    if end > length.into() {
        text += " [beyond its end]";
    } else if end == u64::from(length) && len > 0 {
        text += ", full";
    }
    if remote.rkey != rkey && len > 0 {
        text += " [rkey of another]";
    }
    text
}

/// Describes a request by itself.
pub fn request(request: &Request) -> String {
    let Request { op, remote, immediate, len, ref bytes, .. } = *request;
    let address = remote.map(|remote| format!("{:#x}", remote.address)).unwrap_or_default();
    let mut text = match op {
        Op::Send => message(len, &bytes.0),
        Op::Write => format!("WRITE {len} bytes -> {address}"),
        Op::Read => format!("READ {len} bytes <- {address}"),
    };
    if let Some(immediate) = immediate {
        text += &format!(", imm {immediate}");
    }
    text
}

fn message(len: usize, bytes: &[u8]) -> String {
    match Message::decode(bytes) {
        Ok(message) if len == bytes.len() => {
            let reserved = if bytes == message.encode() { "" } else { " [reserved bytes are not zero]" };
            format!("{}{reserved}", control(&message))
        }
        Err(invalid) if len == bytes.len() => format!("SEND of {len} bytes [{invalid}]"),
        _ => format!("SEND of {len} bytes"),
    }
}

/// Describes a control message.
#[must_use]
pub fn control(message: &Message) -> String {
    match message {
        Message::RegisterXferMemory(Window { address, length, rkey }) => {
            format!("RegisterXferMemory {length} bytes at {address:#x}, rkey {rkey:#x}")
        }
        Message::Keepalive => "Keepalive".into(),
        Message::GetServerFeature { select, features } | Message::SetClientFeature { select, features } => {
            format!("{} select {select}, features {:#x}", message.opcode(), features.0)
        }
    }
}

/// Describes an event of the connection manager, its name first.
pub fn event<B: Backend>(kind: &CmEventKind<B>) -> String {
    let failed = |name: &str, status: i32| {
        format!("{name}: {}", io::Error::from_raw_os_error(status.saturating_neg()))
    };
    match kind {
        CmEventKind::Established { peer } => format!("Established, rnr_retry {}", peer.rnr_retry_count),
        CmEventKind::AddressError { status } => failed("AddressError", *status),
        CmEventKind::RouteError { status } => failed("RouteError", *status),
        CmEventKind::ConnectError { status } => failed("ConnectError", *status),
        CmEventKind::Unreachable { status } => failed("Unreachable", *status),
        CmEventKind::Rejected { reason } => format!("Rejected, reason {reason}"),
        CmEventKind::Async(event) => format!("of the device: {}", event.describe()),
        CmEventKind::Other(number) => format!("number {number} of rdma_cm_event_type"),
        named => format!("{named:?}"),
    }
}

/// Describes a completion.
pub fn outcome(id: u64, outcome: &Outcome) -> String {
    match outcome {
        Outcome::Done { op } => format!("done: {}", op.name()),
        Outcome::Received { len, bytes, .. } => format!("took {}", message(*len as usize, &bytes.0)),
        Outcome::Notified { immediate, place: Some(_), .. } => format!("took imm {immediate}"),
        Outcome::Notified { immediate, place: None, .. } => {
            format!("took imm {immediate} [no window was announced]")
        }
        Outcome::Failed { status, .. } => failed(id, CompletionStatus(*status)),
    }
}

/// Describes a failed completion.
pub fn failed(id: u64, status: CompletionStatus) -> String {
    let meaning = match status {
        // The consequence of another failure.
        CompletionStatus::WR_FLUSH_ERR => "",
        status => &format!(", {}", status.describe()),
    };
    format!("FAILED {id:#x}: {status:?}{meaning}")
}
