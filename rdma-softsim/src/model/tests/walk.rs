//! Random walks: whatever two owners and the network do, every request ends once and in order, and
//! nothing is left.

use super::*;
use proptest::prelude::*;
use rdma_backend::RnrTimer;

#[derive(Clone, Copy, Debug)]
enum Step {
    Send { op: u8, len: usize, signaled: bool, inline: bool },
    Receive { len: usize },
    Poll(usize),
    Arm,
    Pass(u64),
    Link(bool),
    Deregister,
    Disconnect,
    DropPair,
    DropIdentifier,
    Kill,
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![Just(0usize), 1..64usize, Just(5000)];
    prop_oneof![
        30 => (0..7u8, len.clone(), any::<bool>(), any::<bool>())
            .prop_map(|(op, len, signaled, inline)| Step::Send { op, len, signaled, inline }),
        20 => len.prop_map(|len| Step::Receive { len }),
        20 => (0..9usize).prop_map(Step::Poll),
        5 => Just(Step::Arm),
        20 => (0..400u64).prop_map(Step::Pass),
        3 => any::<bool>().prop_map(Step::Link),
        1 => Just(Step::Deregister),
        1 => Just(Step::Disconnect),
        1 => Just(Step::DropPair),
        1 => Just(Step::DropIdentifier),
        1 => Just(Step::Kill),
    ]
}

/// The work requests of one side that have not completed.
#[derive(Default)]
struct Posted {
    next: u64,
    /// Sends, in order, and whether each must be reported.
    sends: Vec<(u64, bool)>,
    receives: Vec<u64>,
    events: u32,
    armed: u32,
}

/// Receives have odd ids.
const RECEIVE: u64 = 1;

impl Posted {
    fn id(&mut self, kind: u64) -> u64 {
        self.next += 2;
        self.next | kind
    }

    /// Checks an arriving completion: it is the oldest of its kind, or earlier ones were
    /// unsignalled.
    fn ended(&mut self, completion: &Completion) {
        if completion.id & RECEIVE == RECEIVE {
            assert_eq!(self.receives.remove(0), completion.id);
            return;
        }
        while let (id, signaled) = self.sends.remove(0)
            && id != completion.id
        {
            assert!(!signaled, "{id} ended in silence before {}", completion.id);
        }
    }
}

fn walk(latency: u64, steps: &[(bool, Step)]) {
    let parameters = Parameters { latency: Duration::from_micros(latency), ..Parameters::default() };
    // Small, so that queues are often full and retries often used up.
    let limits = QueuePairLimits { send_depth: 4, recv_depth: 3, inline: 32 };
    let accept = ConnectParams { rnr_retry_count: 2, ..PARAMS };
    let mut w = World::new(&Setup { parameters, accept, limits, ..Setup::default() });
    for pair in [w.a.pair, w.b.pair] {
        w.model.set_min_rnr_timer(pair, RnrTimer::MICROS_640).unwrap();
    }
    let mut posted = [Posted::default(), Posted::default()];
    for (first, step) in steps {
        let model = &mut w.model;
        let (side, peer) = if *first { (&w.a, &w.b) } else { (&w.b, &w.a) };
        let side_posted = &mut posted[usize::from(!first)];
        match *step {
            Step::Send { op, len, signaled, inline } => {
                let target = peer.remote(if op == 6 { u64::MAX } else { 8 });
                let op = match op {
                    0 => SendOp::Send,
                    1 => SendOp::SendImmediate(Immediate(7)),
                    2 => SendOp::WriteImmediate(target, Immediate(7)),
                    3 => SendOp::Read(target),
                    _ => SendOp::Write(target),
                };
                let id = side_posted.id(0);
                let request = Request::new(id, op, signaled);
                if side.post_work(model, request, side.part(0, len), inline).is_ok() {
                    side_posted.sends.push((id, signaled));
                }
                assert!(side_posted.sends.len() <= 4 || model.pairs.get(side.pair).is_none());
            }
            Step::Receive { len } => {
                let id = side_posted.id(RECEIVE);
                if side.receive(model, id, 0, len).is_ok() {
                    side_posted.receives.push(id);
                }
            }
            Step::Poll(count) => {
                let mut into = [Completion::EMPTY; 8];
                if let Ok(count) = model.poll(side.queue, &mut into[..count.min(8)]) {
                    into.iter().take(count).for_each(|completion| side_posted.ended(completion));
                }
            }
            Step::Arm => {
                side_posted.armed += u32::from(model.arm(side.queue).is_ok());
                side_posted.events += model.take_events(side.queue).unwrap_or(0);
                assert!(side_posted.events <= side_posted.armed, "more events than were asked for");
            }
            Step::Pass(micros) => pass(model, Duration::from_micros(micros)),
            Step::Link(up) => model.set_link(ip(1), if up { Link::Up } else { Link::Down }),
            Step::Deregister => model.deregister(side.region.id),
            Step::Disconnect => drop(model.disconnect(side.id)),
            Step::DropPair => model.destroy_pair(side.pair),
            Step::DropIdentifier => {
                model.destroy_pair(side.pair);
                model.destroy_identifier(side.id);
            }
            Step::Kill => model.kill_host(side.host),
        }
        w.model.settle();
    }
    // In the end both disconnect. Everything that was posted has then ended.
    w.model.set_link(ip(1), Link::Up);
    for (side, side_posted) in [&w.a, &w.b].into_iter().zip(&mut posted) {
        let connected = w.model.disconnect(side.id).is_ok() && w.model.pairs.get(side.pair).is_some();
        let mut into = [Completion::EMPTY; 128];
        let count = w.model.poll(side.queue, &mut into).unwrap_or(0);
        into.iter().take(count).for_each(|completion| side_posted.ended(completion));
        if connected {
            assert!(side_posted.receives.is_empty(), "receives left: {:?}", side_posted.receives);
            assert!(
                side_posted.sends.iter().all(|(_, signaled)| !signaled),
                "sends left: {:?}",
                side_posted.sends
            );
        }
    }
    w.end();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 5 } else { 2000 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_once_and_nothing_is_left(
        latency in prop_oneof![Just(0u64), 1..300u64],
        steps in proptest::collection::vec((any::<bool>(), step()), 0..80),
    ) {
        walk(latency, &steps);
    }
}
