//! The short ways of a machine, each compared with the long way: it does as much, or nothing.

use rdma_proto::Immediate;
use rdma_proto::time::Instant;
use rdma_proto::{Action, Machine, Notification, Readable, Source};

/// Writes in one step; returns the action that does the same in steps.
pub(crate) fn write_at_once(machine: &mut Machine, now: Instant, bytes: usize) -> Option<Action> {
    let mut in_steps = *machine;
    let write = machine.write_at_once(bytes).map(|Notification { id, from, to }| {
        in_steps.commit(bytes).expect("there is room");
        let immediate = Some(Immediate(from.len));
        let write = Action::Write { id, signaled: false, from: Source::Buffer(from), to, immediate };
        assert_eq!(in_steps.poll_action(now), Some(write));
        write
    });
    assert_eq!(*machine, in_steps);
    write
}

/// Takes bytes, which are those that were readable.
pub(crate) fn take(machine: &mut Machine, most: usize) -> Option<Readable> {
    let (before, mut in_steps) = (*machine, *machine);
    let part = in_steps.readable().map(|part| Readable { len: most.min(part.len as usize) as u32, ..part });
    let part = part.filter(|part| part.len > 0);
    if let Some(part) = part {
        in_steps.consume(part.len).expect("it is readable");
    }
    let mut at_once = before;
    match at_once.take_at_once(most) {
        None => assert_eq!(at_once, before),
        taken => {
            assert_eq!(taken, part);
            assert_eq!(at_once.is_settled(), before.is_settled(), "something is to be done");
            // An announcement that waits for a credit is looked at in vain.
            let mut others = [at_once, in_steps];
            let [first, second] = others.each_mut().map(|machine| machine.poll_action(Instant::default()));
            assert_eq!((first, others[0]), (second, others[1]));
        }
    }
    assert_eq!(machine.take(most), part);
    assert_eq!(*machine, in_steps);
    part
}

/// Handles notifications together, if that can be, and one by one otherwise.
pub(crate) fn handle_immediates(machine: &mut Machine, now: Instant, immediates: &[u32]) {
    let (before, mut one_by_one) = (*machine, *machine);
    immediates.iter().for_each(|immediate| one_by_one.handle_immediate(now, Immediate(*immediate)));
    let bytes = immediates.iter().map(|immediate| u64::from(*immediate)).sum();
    let done = machine.handle_immediates(now, immediates.len(), bytes);
    assert_eq!(*machine, if done { one_by_one } else { before });
    *machine = one_by_one;
}
