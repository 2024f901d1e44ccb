//! The plain types of the seam: their descriptions, and their numbers in verbs.

use core::time::Duration;
use std::sync::atomic::AtomicU8;

use rdma_backend::memory::SharedMemory;
use rdma_backend::time::Instant;
use rdma_backend::{
    Access, AsyncEvent, Capabilities, CompletionStatus, RecvRequest, Region, RnrTimer, SendOp, SendRequest,
    Slice,
};

/// Of `ibv_poll_cq(3)`; others keep their number.
#[test]
fn statuses_have_names() {
    let named = [
        (1, "LOC_LEN_ERR"),
        (2, "LOC_QP_OP_ERR"),
        (4, "LOC_PROT_ERR"),
        (5, "WR_FLUSH_ERR"),
        (7, "BAD_RESP_ERR"),
        (8, "LOC_ACCESS_ERR"),
        (9, "REM_INV_REQ_ERR"),
        (10, "REM_ACCESS_ERR"),
        (11, "REM_OP_ERR"),
        (12, "RETRY_EXC_ERR"),
        (13, "RNR_RETRY_EXC_ERR"),
        (16, "REM_ABORT_ERR"),
        (19, "FATAL_ERR"),
        (20, "RESP_TIMEOUT_ERR"),
        (21, "GENERAL_ERR"),
    ];
    for number in 0..30 {
        let status = CompletionStatus(number);
        match named.iter().find(|(of, _)| *of == number) {
            Some((_, name)) => {
                assert_eq!(format!("{status:?}"), *name);
                assert_ne!(status.describe(), "unknown status");
            }
            None => {
                assert_eq!(format!("{status:?}"), format!("CompletionStatus({number})"));
                assert_eq!(status.describe(), "unknown status");
            }
        }
    }
}

/// Numbers are of `enum ibv_event_type`; others keep theirs. A fatal one ends the queue pair.
#[test]
fn asynchronous_events_have_meanings() {
    let known = [
        (0, AsyncEvent::CqErr, true),
        (1, AsyncEvent::QpFatal, true),
        (2, AsyncEvent::QpReqErr, true),
        (3, AsyncEvent::QpAccessErr, true),
        (4, AsyncEvent::CommEst, false),
        (8, AsyncEvent::DeviceFatal, true),
        (9, AsyncEvent::PortActive, false),
        (10, AsyncEvent::PortErr, false),
    ];
    let mut meanings = std::collections::BTreeSet::new();
    for number in 0..30 {
        let event = AsyncEvent::from_number(number);
        let (expected, fatal) = match known.iter().find(|(of, ..)| *of == number) {
            Some(&(_, event, fatal)) => (event, fatal),
            None => (AsyncEvent::Other(number), false),
        };
        assert_eq!((event, event.is_fatal()), (expected, fatal), "number {number}");
        meanings.insert(event.describe());
    }
    assert_eq!(meanings.len(), known.len() + 1, "each has a meaning of its own: {meanings:?}");
}

/// Remote write includes local write, as `ibv_reg_mr(3)` demands.
#[test]
fn rights_say_what_they_include() {
    assert!(Access::REMOTE_WRITE.allows(Access::LOCAL_WRITE));
    assert!(!Access::LOCAL_WRITE.allows(Access::REMOTE_WRITE));
    assert!(!Access::REMOTE_READ.allows(Access::LOCAL_WRITE));
    assert_eq!(format!("{:?}", Access::NONE), "[]");
    let both = Access::REMOTE_READ.and(Access::REMOTE_WRITE);
    assert_eq!(format!("{both:?}"), r#"["LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ"]"#);
}

/// InfiniBand's table: code 0 is the slowest, from 1 on they grow.
#[test]
fn rnr_timers_grow_with_their_code() {
    let delays: Vec<Duration> = (0..32).filter_map(RnrTimer::from_code).map(RnrTimer::delay).collect();
    assert_eq!(delays.len(), 32);
    assert!(delays[1..].is_sorted());
    assert_eq!(delays.iter().max(), Some(&RnrTimer::SLOWEST.delay()));
    assert_eq!(RnrTimer::MICROS_640.delay(), Duration::from_micros(640));
    assert_eq!(RnrTimer::MICROS_640.code(), 12);
    assert_eq!(RnrTimer::from_code(32), None);
}

struct Bytes<const N: usize>([AtomicU8; N]);

impl<const N: usize> Region for Bytes<N> {
    fn len(&self) -> usize {
        N
    }

    fn address(&self) -> u64 {
        1 << 32
    }

    fn rkey(&self) -> u32 {
        7
    }

    fn memory(&self) -> SharedMemory<'_> {
        SharedMemory::new(&self.0)
    }
}

#[test]
fn a_region_is_copied_to_and_from_by_its_memory() {
    let region = Bytes([const { AtomicU8::new(0) }; 16]);
    assert!(region.write(3, b"abcdefgh") && !region.write(9, b"abcdefgh"));
    let mut back = [0; 10];
    assert!(region.read(2, &mut back) && !region.read(7, &mut back));
    assert_eq!(&back, b"\0abcdefgh\0");
}

#[test]
fn requests_are_copies() {
    let region = Bytes([]);
    assert!(region.is_empty());
    let local = Slice { region: &region, offset: 1, len: 2 };
    let send = SendRequest { id: 3, op: SendOp::Send, local, signaled: true, inline: false };
    let recv = RecvRequest { id: 4, local };
    #[expect(clippy::clone_on_copy, reason = "this is about clones")]
    let (local, send, recv) = (local.clone(), send.clone(), recv.clone());
    assert_eq!((local.offset, local.len, send.id, recv.id), (1, 2, 3, 4));
    assert_eq!((send.local.region.rkey(), send.op), (7, SendOp::Send));
}

#[test]
fn capabilities_are_what_they_were_made_of() {
    let made = Capabilities::new(1, 2, 3, 4, 5);
    assert_eq!((made.max_queue_depth, made.max_completions, made.max_region), (1, 2, 3));
    assert_eq!((made.max_read_depth, made.completion_vectors), (4, 5));
}

#[test]
fn memory_tells_only_its_length() {
    let bytes = b"secret".map(AtomicU8::new);
    assert_eq!(format!("{:?}", SharedMemory::new(&bytes)), "SharedMemory { len: 6, .. }");
}

#[test]
fn moments_keep_what_they_were_made_of() {
    let second = Duration::from_secs(1);
    assert_eq!(Instant::from_start(second).since_start(), second);
    assert_eq!(Instant::from_parts(1, 5), Instant::from_start(second).after(Duration::from_nanos(5)));
    let last = Duration::new(u32::MAX.into(), 5);
    assert_eq!(Instant::from_parts(u32::MAX, 5).since_start(), last);
    // For ever: 584 years.
    let never = Instant::from_start(second).after(Duration::MAX);
    assert_eq!(never.since_start(), Duration::from_nanos(u64::MAX));
    assert_eq!(never.after(second), never);
    assert_eq!(Instant::default().since(Instant::from_start(second)), Duration::ZERO);
}
