//! Notification credits: how many of the peer's receives are spoken for.
//!
//! Every SEND and every WRITE with immediate consumes a receive that the peer posted. Window bytes do not limit that: a
//! thousand one-byte writes fit any window. A Valkey server accepts with an RNR retry count of 0, so the first
//! notification without a receive ends the connection (VR-FLOW-005). An acknowledgement by the peer's device proves that a
//! receive *was* there, not that it was posted again (VR-FLOW-008). What does prove it, since a peer handles its receives
//! in order and posts each again as it handles it:
//!
//! * a registration: the peer has handled the immediate that filled its last window;
//! * the first immediate into a window we announced: the peer has handled that announcement;
//! * the answer to GetServerFeature: the peer has handled the question.
//!
//! A peer that gave us endless RNR retries has chosen to make us wait instead; then acknowledgements count, too.

/// What a notification is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Purpose {
    Data,
    Control,
    Question,
}

/// Notifications sent, and how many of them the peer has surely handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Credits {
    limit: u64,
    handled: u64,
    /// The count of notifications after the one that filled the peer's window, ...
    filled: Option<u64>,
    /// ... after our last registration, ...
    announced: Option<u64>,
    /// ... and after our last question.
    asked: Option<u64>,
}

impl Credits {
    pub(crate) const fn new(limit: u16) -> Self {
        Self { limit: limit as u64, handled: 0, filled: None, announced: None, asked: None }
    }

    /// Whether one more notification may be sent for `purpose` when `sent` were.
    ///
    /// Data leaves some credits to control messages, so that a registration never waits behind it; and all leave the last
    /// one to the question, whose answer gives credits back.
    pub(crate) const fn allow(&self, sent: u64, purpose: Purpose) -> bool {
        let half = self.limit / 2;
        let kept_back = match purpose {
            Purpose::Data if half < 8 => half,
            Purpose::Data => 8,
            Purpose::Control => !self.expects_proof() as u64,
            Purpose::Question => 0,
        };
        self.in_flight(sent).saturating_add(kept_back) < self.limit
    }

    /// Whether a question is under way whose answer will give credits back. One whose proof came by another way will not.
    const fn expects_proof(&self) -> bool {
        match self.asked {
            Some(mark) => mark > self.handled,
            None => false,
        }
    }

    pub(crate) const fn in_flight(&self, sent: u64) -> u64 {
        sent.saturating_sub(self.handled)
    }

    /// Whether it is time to ask for a proof: half the budget is unproven.
    pub(crate) const fn wants_proof(&self, sent: u64) -> bool {
        self.asked.is_none() && self.in_flight(sent) >= self.limit.div_ceil(2)
    }

    pub(crate) const fn sent_window_end(&mut self, sent: u64) {
        self.filled = Some(sent);
    }

    pub(crate) const fn sent_registration(&mut self, sent: u64) {
        self.announced = Some(sent);
    }

    pub(crate) const fn sent_question(&mut self, sent: u64) {
        self.asked = Some(sent);
    }

    pub(crate) const fn has_asked(&self) -> bool {
        self.asked.is_some()
    }

    pub(crate) const fn got_registration(&mut self) {
        let mark = self.filled.take();
        self.prove(mark);
    }

    /// Says whether that gave credits back: only the first bytes in a window do.
    pub(crate) const fn got_data(&mut self) -> bool {
        let before = self.handled;
        let mark = self.announced.take();
        self.prove(mark);
        self.handled > before
    }

    pub(crate) const fn got_answer(&mut self) {
        let mark = self.asked.take();
        self.prove(mark);
    }

    pub(crate) const fn got_acknowledgement(&mut self, notices: u64) {
        self.prove(Some(notices));
    }

    const fn prove(&mut self, mark: Option<u64>) {
        if let Some(mark) = mark
            && mark > self.handled
        {
            self.handled = mark;
        }
    }
}
