//! Compares combined operations of a machine with their separate steps.

use rdma_proto::Immediate;
use rdma_proto::time::Instant;
use rdma_proto::{Machine, Readable, Span};

/// The place and the due work are the same as in two steps.
pub(crate) fn put(machine: &mut Machine, now: Instant, most: usize) -> Option<Span> {
    let mut in_steps = *machine;
    let space = in_steps.space();
    let len = most.min(space.len as usize) as u32;
    let place = (len > 0 && in_steps.commit(len as usize).is_ok()).then_some(Span { len, ..space });
    assert_eq!(machine.put(most), place);
    let [mut first, mut second] = [*machine, in_steps];
    loop {
        let [first, second] = [&mut first, &mut second].map(|machine| machine.poll_action(|| now));
        assert_eq!(first, second);
        if first.is_none() {
            break;
        }
    }
    assert_eq!(first, second);
    place
}

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
            // An announcement may wait for a credit.
            let mut others = [at_once, in_steps];
            let [first, second] = others.each_mut().map(|machine| machine.poll_action(Instant::default));
            assert_eq!((first, others[0]), (second, others[1]));
        }
    }
    assert_eq!(machine.take(most), part);
    assert_eq!(*machine, in_steps);
    part
}

pub(crate) fn handle_immediates(machine: &mut Machine, now: Instant, immediates: &[u32]) {
    let (before, mut one_by_one) = (*machine, *machine);
    immediates.iter().for_each(|immediate| one_by_one.handle_immediate(now, Immediate(*immediate)));
    let bytes = immediates.iter().map(|immediate| u64::from(*immediate)).sum();
    let done = machine.handle_immediates(now, immediates.len(), bytes);
    assert_eq!(*machine, if done { one_by_one } else { before });
    *machine = one_by_one;
}
