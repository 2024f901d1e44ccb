//! Notification credits: how many of the peer's receives are in use.
//!
//! Every SEND and every WRITE with immediate consumes a receive that the peer posted. Windows do
//! not limit them: a thousand one-byte writes fit any window. A Valkey server accepts with an RNR
//! retry count of 0: the first notification without a receive ends the connection (VR-FLOW-005). An
//! acknowledgement proves that a receive *was* there, not that it was reposted (VR-FLOW-008). A
//! peer handles its receives in order, and reposts each. So the proofs are:
//!
//! * a registration: the peer has handled the immediate that filled its last window;
//! * the first immediate into a window we announced: the peer has handled that announcement;
//! * the answer to GetServerFeature: the peer has handled everything before the question. A Valkey
//!   server answers before it reposts the question's receive, so briefly it has one fewer than
//!   counted here. With eight receives or more, one is reserved for it. Deployed peers have 1024.
//!
//! If a peer gave us endless RNR retries, a missing receive makes us wait: acknowledgements count.

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Purpose {
    Data,
    Control,
    Question,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Credits {
    limit: u64,
    /// In-flight limit for data notifications.
    for_data: u64,
    handled: u64,
    /// Notifications that the peer's program has taken.
    taken: u64,
    /// The count after the notification that filled the peer's window.
    filled: Option<u64>,
    /// The count after our last registration.
    announced: Option<u64>,
    asked: Option<u64>,
}

impl Credits {
    pub(crate) const fn new(limit: u16) -> Self {
        let limit = limit as u64;
        let half = limit / 2;
        // Of few receives only half is kept back, so that data can leave.
        let for_data = limit.saturating_sub(if half < 8 { half } else { 8 });
        Self { limit, for_data, handled: 0, taken: 0, filled: None, announced: None, asked: None }
    }

    /// Returns whether one more notification may be sent for `purpose` when `sent` were.
    ///
    /// Data leaves some credits to control messages: a registration never waits behind it. Both
    /// leave one for the question, whose answer returns credits, and one for the last question's
    /// receive, which may not be reposted when its answer comes.
    #[inline]
    pub(crate) const fn allow(&self, sent: u64, purpose: Purpose) -> bool {
        // Of fewer than 8, none is kept for an answered question. The last is for the next
        // question, unless an answer in flight returns some (spec/few-receives.md).
        let most = match purpose {
            Purpose::Data => self.for_data,
            Purpose::Control if self.limit < 8 => self.limit.saturating_sub(!self.expects_proof() as u64),
            Purpose::Control => self.limit.saturating_sub(2),
            Purpose::Question => self.limit,
        };
        self.in_flight(sent) < most
    }

    /// Whether the answer to a question in flight returns credits: no proof overtook it.
    const fn expects_proof(&self) -> bool {
        match self.asked {
            Some(mark) => mark > self.handled,
            None => false,
        }
    }

    #[inline]
    pub(crate) const fn in_flight(&self, sent: u64) -> u64 {
        sent.saturating_sub(self.handled)
    }

    /// Returns whether to ask for a proof: half the budget is unproven.
    #[inline]
    pub(crate) const fn wants_proof(&self, sent: u64) -> bool {
        // There is one mark, so one question at a time. Its answer proves all before it.
        self.asked.is_none() && self.in_flight(sent) >= self.limit.div_ceil(2)
    }

    /// Returns the count of notifications below which data may be sent.
    pub(crate) const fn for_data(&self) -> u64 {
        self.handled.saturating_add(self.for_data)
    }

    /// Returns the count of notifications below which no proof need be requested.
    pub(crate) const fn before_proof(&self) -> u64 {
        let half = self.limit.div_ceil(2);
        // The notification that reaches half makes the question due, so the budget ends before it.
        if self.asked.is_some() { u64::MAX } else { self.handled.saturating_add(half).saturating_sub(1) }
    }

    pub(crate) fn sent_window_end(&mut self, sent: u64) {
        self.filled = Some(sent);
    }

    pub(crate) fn sent_registration(&mut self, sent: u64) {
        self.announced = Some(sent);
    }

    pub(crate) fn sent_question(&mut self, sent: u64) {
        self.asked = Some(sent);
    }

    pub(crate) const fn has_asked(&self) -> bool {
        self.asked.is_some()
    }

    pub(crate) fn got_registration(&mut self) {
        let mark = self.filled.take();
        self.prove(mark);
    }

    #[inline]
    pub(crate) const fn awaits_data(&self) -> bool {
        self.announced.is_some()
    }

    /// Returns whether that returned credits, as only the first bytes in a window do.
    pub(crate) fn got_data(&mut self) -> bool {
        let before = self.handled;
        let mark = self.announced.take();
        self.prove(mark);
        self.handled > before
    }

    pub(crate) fn got_answer(&mut self) {
        // This counts the question itself, which may not be handled yet: `allow` keeps a receive
        // for it (VR-FLOW-008).
        let mark = self.asked.take();
        self.prove(mark);
    }

    pub(crate) fn got_acknowledgement(&mut self, notices: u64) {
        // Another proof may have shown more already.
        if notices > self.handled {
            self.handled = notices;
        }
    }

    /// The peer's program has sent something since the last keepalive: it takes completions, and
    /// has taken all that its device had acknowledged by then.
    pub(crate) fn peer_spoke(&mut self, acknowledged: u64) {
        if acknowledged > self.taken {
            self.taken = acknowledged;
        }
    }

    /// Returns whether a Keepalive would find a receive even if the peer's program reposts none.
    /// Acknowledgements do not prove that. Without one it would wait for the program, and
    /// everything later behind it (VR-KEEP-004, VR-KEEP-008).
    pub(crate) const fn has_receive_for_keepalive(&self, sent: u64) -> bool {
        sent.saturating_sub(self.taken).saturating_add(1) < self.limit
    }

    fn prove(&mut self, mark: Option<u64>) {
        if let Some(mark) = mark {
            self.got_acknowledgement(mark);
            self.peer_spoke(mark);
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::collections::HashSet;
    use std::vec::Vec;

    use super::*;

    /// Returns the most receives in use over every order of data, control messages, due questions
    /// and answers. The receive of the last answered question is not reposted (VR-FLOW-008).
    fn most_receives_in_use(limit: u16) -> u64 {
        let mut most = 0;
        let mut seen = HashSet::new();
        let mut open: Vec<(Credits, u64, bool)> = Vec::from([(Credits::new(limit), 0, false)]);
        while let Some((credits, sent, late)) = open.pop() {
            most = most.max(credits.in_flight(sent) + u64::from(late));
            if sent > 3 * u64::from(limit) || !seen.insert((credits, sent, late)) {
                continue;
            }
            let may_ask = !credits.has_asked() && credits.allow(sent, Purpose::Question);
            // A due question precedes data; control messages precede the question.
            let data = credits.allow(sent, Purpose::Data) && !(may_ask && credits.wants_proof(sent));
            if data || credits.allow(sent, Purpose::Control) {
                open.push((credits, sent + 1, late));
            }
            if may_ask {
                let mut asked = credits;
                asked.sent_question(sent + 1);
                open.push((asked, sent + 1, late));
            }
            if credits.has_asked() {
                let mut answered = credits;
                answered.got_answer();
                open.push((answered, sent, true));
            }
        }
        most
    }

    /// VR-FLOW-008: the last is for the next question, unless the answer to one in flight returns
    /// some. If a patient peer has acknowledged that question, it returns none.
    #[test]
    fn of_few_receives_the_last_is_for_a_question_whose_answer_proves_something() {
        for limit in 2..8 {
            let last = u64::from(limit) - 1;
            let mut credits = Credits::new(limit);
            assert!(!credits.allow(last, Purpose::Control) && credits.allow(last, Purpose::Question));
            credits.sent_question(1);
            assert!(credits.allow(last, Purpose::Control), "{limit}");
            credits.got_acknowledgement(1);
            assert!(!credits.allow(1 + last, Purpose::Control), "{limit}");
            assert!(credits.allow(1 + last, Purpose::Question), "{limit}");
        }
    }

    /// VR-FLOW-005, VR-FLOW-008.
    #[test]
    fn the_receive_of_an_answered_question_is_covered() {
        for limit in 8..=20 {
            assert!(most_receives_in_use(limit) <= limit.into(), "{limit}");
        }
    }
}
