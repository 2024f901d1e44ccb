//! A record of a target's messages and broken rules, kept in every case.

use rdma_proto::wire::{Message, Opcode, Window};
use suite::hex;

/// A rule that the target broke.
#[allow(missing_docs)] // plain fields
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breach {
    pub requirement: &'static str,
    pub what: String,
}

/// The messages, bytes and broken rules of a target.
#[derive(Debug, Default)]
pub struct Seen {
    /// Whether it is a server, whose windows may grow.
    pub(super) is_server: bool,
    /// Its registrations.
    pub windows: Vec<Window>,
    /// Messages by opcode.
    pub messages: [u64; 4],
    /// Feature bits that it requested.
    pub features_set: u64,
    /// Notifications of payload.
    pub notifications: u64,
    /// Notifications of no bytes.
    pub empty: u64,
    /// Messages with reserved bytes other than zero.
    pub reserved: u64,
    /// Broken rules, the first of each kind.
    pub breaches: Vec<Breach>,
}

impl Seen {
    pub(super) fn breach(&mut self, requirement: &'static str, what: String) {
        if self.breaches.iter().all(|breach| breach.requirement != requirement) {
            self.breaches.push(Breach { requirement, what });
        }
    }

    pub(super) fn message(&mut self, bytes: &[u8]) {
        let Ok(message) = Message::decode(bytes) else {
            let requirement = if bytes.len() == 32 { "VR-CTRL-004" } else { "VR-CTRL-002" };
            let what = format!("it sent a message of {} bytes: {}", bytes.len(), hex::start(bytes));
            return self.breach(requirement, what);
        };
        let opcode = message.opcode();
        if let Some(count) = self.messages.get_mut(usize::from(opcode.0)) {
            *count += 1;
        }
        if let Message::SetClientFeature { features, .. } = message {
            self.features_set |= features.0;
        }
        // A question's features are not reserved bytes, although they mean nothing.
        if bytes != message.encode() {
            self.reserved += 1;
            tracing::debug!(?opcode, "reserved bytes are not zero");
        }
    }

    pub(super) fn registration(&mut self, window: Window, before: Option<Window>, used: u32) {
        self.windows.push(window);
        let Window { address, length, .. } = window;
        if length == 0 {
            self.breach("VR-MEM-006", "it registered a window of no bytes".into());
        }
        if address.checked_add(u64::from(length)).is_none() {
            self.breach("VR-MEM-007", format!("its window of {length} bytes at {address:#x} wraps"));
        }
        let Some(before) = before else { return };
        if used < before.length {
            let before = before.length;
            let what =
                format!("it registered a window when only {used} of the {before} bytes before were used");
            self.breach("VR-MEM-004", what);
        }
        let grows = self.is_server && length > before.length;
        if length != before.length && !grows {
            let what = format!("its window of {} bytes became one of {length}", before.length);
            self.breach("VR-MEM-008", what);
        }
    }

    pub(super) fn notified(&mut self, count: u32) {
        self.notifications += 1;
        self.empty += u64::from(count == 0);
    }

    /// Returns how many receives it has used, by messages and by payload.
    pub fn all(&self) -> u64 {
        self.messages.iter().sum::<u64>() + self.notifications
    }

    /// Returns how many messages of an opcode came.
    pub fn count(&self, opcode: Opcode) -> u64 {
        self.messages.get(usize::from(opcode.0)).copied().unwrap_or_default()
    }
}
