//! Rules that hold in every trace, whatever its steps expect.

use std::collections::VecDeque;

use super::data::{Bytes, Fields, Hex, Input, Need, Output, Phase, Settings, Trace};
use super::protocol::{Reply, shown};
use rdma_proto::wire::Message;
use suite::Role;

/// The words about a message whose reserved bytes are not zero.
pub(super) const RESERVED: &str = "reserved bytes are zero (VR-CTRL-005)";

/// The state of a trace from the peer's point of view. Every output is checked against it.
pub(super) struct Invariants<'a> {
    role: Role,
    settings: &'a Settings,
    established: bool,
    ended: bool,
    left: bool,
    /// The peer's window, and how much of it was written.
    window: Option<(Fields, u32)>,
    unnotified: u64,
    /// Bytes from the application, and bytes written.
    given: u64,
    sent: u64,
    /// The `select` of each open question: that the peer asked a server, or that a client asked.
    questions: Vec<u16>,
    /// Violations of a *should*, which others accept.
    pub(super) lenient: Vec<String>,
    /// Notifications: messages and immediates; and the empty ones.
    pub(super) notifications: u64,
    empty: u64,
    /// How many of them the peer has certainly handled.
    handled: Handled,
    /// Work requests that have not completed, and all of them.
    posted: u64,
    pub(super) requests: u64,
    /// For each of our regions, the number of its last window; and the number of windows.
    last: [Option<u64>; 2],
    windows: u64,
    /// Bytes received in our last window; all received bytes; all read bytes.
    received: u64,
    arrived: u64,
    read: u64,
}

impl<'a> Invariants<'a> {
    pub(super) fn new(trace: &'a Trace) -> Self {
        Self {
            role: trace.role,
            settings: &trace.settings,
            established: false,
            ended: false,
            left: false,
            window: None,
            unnotified: 0,
            given: 0,
            sent: 0,
            questions: Vec::new(),
            lenient: Vec::new(),
            notifications: 0,
            empty: 0,
            posted: 0,
            requests: 0,
            handled: Handled { counts: trace.needs.contains(&Need::Credits), ..Handled::default() },
            last: [None; 2],
            windows: 0,
            received: 0,
            arrived: 0,
            read: 0,
        }
    }

    /// Returns how many notifications were not empty.
    pub(super) const fn telling(&self) -> u64 {
        self.notifications - self.empty
    }

    /// Records a violation of a *should*, once.
    fn against(&mut self, should: String) {
        if !self.lenient.contains(&should) {
            self.lenient.push(should);
        }
    }

    pub(super) fn input(&mut self, input: &Input) {
        match input {
            Input::Established { rnr_retry } => {
                self.established = true;
                // A server does not ask, and relies on completions.
                self.handled.by_completions = *rnr_retry == 7 || self.role == Role::Server;
            }
            Input::Disconnected {} => self.left = true,
            Input::Write { length } => self.given += u64::from(*length),
            Input::Read { length } => self.read = self.arrived.min(self.read + u64::from(*length)),
            Input::Acknowledged {} => {
                self.posted = 0;
                if self.handled.by_completions {
                    self.handled.up_to(Some(self.notifications));
                }
            }
            Input::Immediate { value } => {
                if *value > 0 {
                    let mark = self.handled.registered.take();
                    self.handled.up_to(mark);
                }
                self.received += u64::from(*value);
                self.arrived += u64::from(*value);
            }
            Input::Receive { message } => self.message(*message),
            Input::Bytes { hex } => {
                if let Ok(message) = Message::decode(&hex.0) {
                    self.message(message.into());
                }
            }
            _ => {}
        }
    }

    /// Returns `input` as the peer sends it to this implementation: the answer to a question has
    /// its `select`, and one that is to be refused has the `select` of no open question.
    pub(super) fn addressed(&self, input: &Input, valid: bool) -> Input {
        let mut input = input.clone();
        if self.role == Role::Server {
            return input;
        }
        match (&mut input, self.questions.first()) {
            (Input::Receive { message: Fields::GetServerFeature { select, .. } }, Some(open)) if valid => {
                *select = *open;
            }
            (Input::Receive { message: Fields::GetServerFeature { select, .. } }, _) => {
                while self.questions.contains(select) {
                    *select = select.wrapping_add(1);
                }
            }
            (Input::Bytes { hex }, Some(open)) if valid && is_answer(&hex.0) => {
                if let Some(select) = hex.0.get_mut(2..4) {
                    select.copy_from_slice(&open.to_be_bytes());
                }
            }
            _ => {}
        }
        input
    }

    /// Returns whether bytes are left that its send queue may have no room for.
    pub(super) fn waits_for_completions(&self, end: &Reply) -> bool {
        let usual = Settings::default().send_depth;
        let Reply::Ok { unsent: 1.., .. } = end else { return false };
        !self.ended && self.settings.send_depth == usual && self.posted >= u64::from(usual / 4 * 3)
    }

    fn message(&mut self, message: Fields) {
        match message {
            Fields::RegisterXferMemory { .. } => {
                self.window = Some((message, 0));
                let mark = self.handled.filled.take();
                self.handled.up_to(mark);
            }
            Fields::GetServerFeature { select, .. } => {
                match self.role {
                    Role::Server => self.questions.push(select),
                    Role::Client if self.questions.is_empty() => {}
                    Role::Client => drop(self.questions.remove(0)),
                }
                let mark = self.handled.asked.pop_front();
                self.handled.up_to(mark);
            }
            _ => {}
        }
    }

    /// Records an output of the implementation. `None` if it counts only together with the next.
    pub(super) fn output(&mut self, reply: &Reply) -> Result<Option<Output>, String> {
        if self.ended {
            return Err(format!("{} after its disconnect (VR-CLOSE-006)", shown(reply)));
        }
        match reply {
            Reply::Disconnect => {
                self.ended = true;
                Ok(Some(Output::Disconnect))
            }
            Reply::Send { hex } if !self.established && self.may_be_early(hex) => {
                self.send(hex).map(|message| Some(Output::Send(message)))
            }
            _ if !self.established => Err(format!("{} before the connection is established", shown(reply))),
            Reply::Send { .. } | Reply::Write { .. }
                if self.posted == u64::from(self.settings.send_depth) =>
            {
                Err(format!("{}, where {} requests are in flight (VR-FLOW-011)", shown(reply), self.posted))
            }
            Reply::Send { hex } => self.send(hex).map(|message| Some(Output::Send(message))),
            Reply::Write { length: 0, immediate: None, .. } => {
                self.post();
                Ok(None)
            }
            Reply::Write { address, rkey, length, immediate } => {
                self.write(*address, *rkey, *length, *immediate)
            }
            other => Err(format!("{} is not something it can do", shown(other))),
        }
    }

    /// Returns whether a connection in `state` lacks its disconnect. Answering the peer's is only a
    /// should (VR-CLOSE-005).
    pub(super) fn owes_disconnect(&self, state: Phase) -> bool {
        let over = state == Phase::Failed || (state == Phase::Closed && !self.left);
        self.established && !self.ended && over
    }

    /// Returns whether requests posted now count for the step that establishes the connection.
    pub(super) const fn is_early(&self) -> bool {
        !self.established
    }

    /// A server may answer and send Keepalive from the acceptance on, before it sees the event.
    fn may_be_early(&self, Bytes(bytes): &Bytes) -> bool {
        let message = Message::decode(bytes);
        self.role == Role::Server
            && matches!(message, Ok(Message::GetServerFeature { .. } | Message::Keepalive))
    }

    const fn post(&mut self) {
        self.posted += 1;
        self.requests += 1;
    }

    fn send(&mut self, Bytes(bytes): &Bytes) -> Result<Fields, String> {
        self.post();
        let message =
            Message::decode(bytes).map_err(|error| format!("it sent no control message: {error}"))?;
        self.notifications += 1;
        let mut fields = Fields::from(message);
        if message.encode() != bytes[..] {
            self.against(format!("{}: {RESERVED}", shown(&fields)));
        }
        if let Fields::GetServerFeature { select, features } = &mut fields
            && self.role == Role::Client
        {
            if features.0 != 0 {
                self.against("`features` of a question are zero (VR-FEAT-012)".to_string());
                *features = Hex(0);
            }
            // Any will do: see `addressed`.
            self.questions.push(std::mem::take(select));
        }
        match fields {
            Fields::RegisterXferMemory { .. } => self.handled.registered = Some(self.notifications),
            Fields::GetServerFeature { .. } => self.handled.asked.push_back(self.notifications),
            _ => {}
        }
        self.check_receives()?;
        match (fields, self.role) {
            (Fields::RegisterXferMemory { address, length, rkey }, _) => {
                self.register(address, length, rkey)?;
            }
            (Fields::GetServerFeature { select, .. }, Role::Server) => {
                let question = self.questions.iter().position(|open| *open == select);
                let question = question.ok_or_else(|| {
                    format!("an answer with select {select}, and no question with it is open (VR-FEAT-002, VR-FEAT-005)")
                })?;
                self.questions.remove(question);
            }
            (Fields::SetClientFeature { .. }, Role::Server) => {
                return Err("a server sent SetClientFeature (VR-FEAT-006)".to_string());
            }
            _ => {}
        }
        Ok(fields)
    }

    fn register(&mut self, address: Hex, length: u32, rkey: Hex) -> Result<(), String> {
        let Settings { window, windows, address2, rkey2, .. } = *self.settings;
        let region = match (address, rkey) {
            at if at == (self.settings.address, self.settings.rkey) => 0,
            at if at == (address2, rkey2) && windows == 2 => 1,
            _ => {
                return Err(format!(
                    "it registered {address:?} with key {rkey:?}, which is no region of its"
                ));
            }
        };
        if length != window {
            return Err(format!("it registered {length} bytes of a region of {window} (VR-MEM-008)"));
        }
        if self.windows > 0 && self.received < u64::from(window) {
            return Err(format!(
                "it registered when {} of {window} bytes were received (VR-MEM-004)",
                self.received
            ));
        }
        if let Some(number) = self.last[region]
            && self.read < (number + 1) * u64::from(window)
        {
            return Err(
                "it registered a region that is not read to the end (VR-MEM-003, VR-MEM-010)".to_string()
            );
        }
        self.last[region] = Some(self.windows);
        self.windows += 1;
        self.received = 0;
        Ok(())
    }

    fn write(
        &mut self,
        address: Hex,
        rkey: Hex,
        length: u32,
        immediate: Option<u32>,
    ) -> Result<Option<Output>, String> {
        let Some((Fields::RegisterXferMemory { address: begin, length: room, rkey: key }, used)) =
            &mut self.window
        else {
            return Err("it wrote before there was a window (VR-FLOW-004)".to_string());
        };
        let next = Hex(begin.0.wrapping_add(u64::from(*used)));
        if length > 0 && (address, rkey) != (next, *key) {
            return Err(format!(
                "it wrote to {address:?} with key {rkey:?}; the next byte is at {next:?}, key {key:?} (VR-MEM-002)"
            ));
        }
        if length > *room - *used {
            return Err(format!("it wrote {length} bytes where {} fit (VR-FLOW-007)", *room - *used));
        }
        *used += length;
        let is_full = used == room;
        self.post();
        self.unnotified += u64::from(length);
        self.sent += u64::from(length);
        if self.sent > self.given {
            return Err(format!("it wrote {} bytes and was given {}", self.sent, self.given));
        }
        let Some(immediate) = immediate else { return Ok(None) };
        self.notifications += 1;
        if is_full {
            self.handled.filled = Some(self.notifications);
        }
        if u64::from(immediate) != self.unnotified {
            return Err(format!(
                "its immediate is {immediate} after {} bytes (VR-XFER-004)",
                self.unnotified
            ));
        }
        self.unnotified = 0;
        self.check_receives()?;
        if immediate == 0 {
            self.empty += 1;
            self.against("an immediate of 0 is not sent (VR-XFER-010)".to_string());
            return Ok(None);
        }
        Ok(Some(Output::Payload(immediate.into())))
    }

    /// Each notification needs one of the peer's receives.
    fn check_receives(&self) -> Result<(), String> {
        let unhandled = self.notifications - self.handled.notifications;
        let receives = self.settings.peer_receives;
        if self.handled.counts && unhandled > u64::from(receives) {
            return Err(format!(
                "{unhandled} notifications that the peer may not have handled, and it keeps {receives} receives (VR-FLOW-005)"
            ));
        }
        Ok(())
    }
}

fn is_answer(bytes: &[u8]) -> bool {
    matches!(Message::decode(bytes), Ok(Message::GetServerFeature { .. }))
}

/// The notifications that the peer has proven to have handled (VR-FLOW-008). An answer counts for
/// its question, too: the peer posts that receive again right after it.
#[derive(Default)]
struct Handled {
    /// Whether the trace is about that.
    counts: bool,
    by_completions: bool,
    notifications: u64,
    /// The count of notifications after the latest registration.
    registered: Option<u64>,
    /// The count after the one that filled the peer's window.
    filled: Option<u64>,
    /// The count after each open question.
    asked: VecDeque<u64>,
}

impl Handled {
    fn up_to(&mut self, mark: Option<u64>) {
        self.notifications = self.notifications.max(mark.unwrap_or_default());
    }
}
