use core::sync::atomic::AtomicU8;
use std::os::fd::AsRawFd;

use rdma_backend::memory::{CallerMemory, DmaBuf, SharedMemory};
use rdma_backend::{
    Access, Completed, CompletionStatus, ConnectParams, Domain as _, ErrorKind, Failure as _,
    Identifier as _, Immediate, QueuePair as _, QueuePairLimits, RecvRequest, Region as _, RemoteAddress,
    RnrTimer, SendOp, SendRequest, Slice,
};

use crate::harness::{End, LEN, PARAMS, Shape, lab};

fn fails(end: &End, status: CompletionStatus) {
    let error = end.completion().result.unwrap_err();
    assert_eq!(error.status, status);
}

#[test]
fn without_a_receive_and_without_retries_a_send_fails() {
    let Some(lab) = lab() else { return };
    // As Valkey's, the server lets the client try once, and posts nothing.
    let params = ConnectParams { rnr_retry_count: 0, ..PARAMS };
    let server = Shape { receives: 0, params, ..Shape::default() };
    let pair = lab.pair_of(server, Shape::default());
    pair.server.qp.set_min_rnr_timer(RnrTimer::MICROS_640).unwrap();
    pair.client.post(SendOp::Send, 0, 4);
    fails(&pair.client, CompletionStatus::RNR_RETRY_EXC_ERR);
    let request = pair.client.request(5, SendOp::Send, 0, 4);
    pair.client.qp.post_send(&[SendRequest { signaled: false, ..request }]).unwrap();
    for _ in 0..=Shape::default().receives {
        fails(&pair.client, CompletionStatus::WR_FLUSH_ERR);
    }
}

#[test]
fn with_retries_for_ever_a_send_waits_for_its_receive() {
    let Some(lab) = lab() else { return };
    let server = Shape { receives: 0, ..Shape::default() };
    let pair = lab.pair_of(server, Shape::default());
    pair.server.qp.set_min_rnr_timer(RnrTimer::MICROS_640).unwrap();
    pair.client.post(SendOp::Send, 0, 4);
    pair.client.quiet();
    pair.server.receive(0..1);
    assert_eq!(pair.server.completed().1, Completed::Recv { len: 4, immediate: None });
    assert_eq!(pair.client.completed().1, Completed::Send);
}

/// A device with dma-bufs looks at it, others say they cannot.
#[test]
fn what_is_no_dma_buf_is_refused() {
    let Some(lab) = lab() else { return };
    let pair = lab.pair();
    let file = std::fs::File::open("/dev/null").unwrap();
    let refused =
        pair.server.domain.register_memory(NoDmaBuf(file, [const { AtomicU8::new(0) }; 64]), Access::NONE);
    let error = refused.unwrap_err();
    println!("{error}");
    assert_eq!(error.kind(), ErrorKind::Argument);
    assert!(error.to_string().starts_with("ibv_reg_dmabuf_mr: "), "{error}");
}

struct NoDmaBuf(std::fs::File, [AtomicU8; 64]);

impl CallerMemory for NoDmaBuf {
    fn shared(&self) -> SharedMemory<'_> {
        SharedMemory::new(&self.1)
    }

    fn dma_buf(&self) -> Option<DmaBuf> {
        // SAFETY: no dma-buf, as the kernel finds out before a device uses it.
        Some(unsafe { DmaBuf::new(self.0.as_raw_fd(), 0) })
    }
}

#[test]
fn foreign_memory_is_refused() {
    let Some(lab) = lab() else { return };
    type Target = fn(&End) -> RemoteAddress;
    let read_only = |end: &End| end.domain.register(64, Access::REMOTE_READ).unwrap();
    let cases: [(&str, Target); 3] = [
        ("a key that nobody gave", |end| RemoteAddress { rkey: !end.region.rkey(), ..end.remote(0) }),
        ("one byte beyond the end", |end| end.remote(LEN - 3)),
        ("an address before the region", |end| RemoteAddress {
            address: end.region.address() - 1,
            ..end.remote(0)
        }),
    ];
    for (what, target) in cases {
        println!("{what}");
        let pair = lab.pair();
        pair.client.post(SendOp::Write(target(&pair.server)), 0, 4);
        fails(&pair.client, CompletionStatus::REM_ACCESS_ERR);
    }
    println!("a region that may only be read");
    let pair = lab.pair();
    let region = read_only(&pair.server);
    let address = RemoteAddress { address: region.address(), rkey: region.rkey() };
    pair.client.post(SendOp::Read(address), 0, 4);
    assert_eq!(pair.client.completed().1, Completed::Read);
    pair.client.post(SendOp::Write(address), 0, 4);
    fails(&pair.client, CompletionStatus::REM_ACCESS_ERR);
    println!("a region that is gone");
    let pair = lab.pair();
    let region = read_only(&pair.server);
    let address = RemoteAddress { address: region.address(), rkey: region.rkey() };
    drop(region);
    pair.client.post(SendOp::Read(address), 0, 4);
    fails(&pair.client, CompletionStatus::REM_ACCESS_ERR);
}

#[test]
fn a_message_longer_than_its_receive_is_an_error_on_both_sides() {
    let Some(lab) = lab() else { return };
    let pair = lab.pair();
    pair.client.post(SendOp::Send, 0, 65);
    // Specified are LOC_LEN_ERR and REM_INV_REQ_ERR; soft-RoCE tells the receiver LOC_QP_OP_ERR.
    for (who, end) in [("receiver", &pair.server), ("sender", &pair.client)] {
        let error = end.completion().result.unwrap_err();
        println!("the {who} sees {:?}", error.status);
        assert_ne!(error.status, CompletionStatus::WR_FLUSH_ERR);
    }
}

#[test]
fn a_region_without_local_write_takes_no_receive() {
    let Some(lab) = lab() else { return };
    let pair = lab.pair_of(Shape { receives: 0, ..Shape::default() }, Shape::default());
    let region = pair.server.domain.register(64, Access::NONE).unwrap();
    let local = Slice { region: &region, offset: 0, len: 64 };
    match pair.server.qp.post_recv(&[RecvRequest { id: 1, local }]) {
        Err(error) => println!("refused at once: {}", error.error),
        Ok(()) => {
            pair.client.post(SendOp::Send, 0, 4);
            let error = pair.server.completion().result.unwrap_err();
            println!("refused when used: {:?}", error.status);
        }
    }
    assert_eq!(crate::harness::read(&region, 0, 4), [0; 4]);
}

#[test]
fn a_full_queue_says_how_much_it_took() {
    let Some(lab) = lab() else { return };
    let limits = QueuePairLimits { send_depth: 40, recv_depth: 40, inline: 0 };
    let server = Shape { receives: 0, ..Shape::default() };
    let client = Shape { limits, receives: 0, ..Shape::default() };
    let pair = lab.pair_of(server, client);
    pair.server.qp.set_min_rnr_timer(RnrTimer::MICROS_640).unwrap();
    // Without a receive nothing completes: the queue fills.
    let chain: Vec<_> = (0..500).map(|index| pair.client.request(index, SendOp::Send, 0, 4)).collect();
    let error = pair.client.qp.post_send(&chain).unwrap_err();
    assert_eq!(error.error.kind(), ErrorKind::QueueFull);
    println!("a send queue for 40 took {}", error.posted);
    assert!((40..500).contains(&error.posted));
    let again = pair.client.qp.post_send(&chain[error.posted..]).unwrap_err();
    assert_eq!((again.posted, again.error.kind()), (0, ErrorKind::QueueFull));
    for index in 0..error.posted {
        pair.server.receive(index..index + 1);
        assert_eq!(pair.server.completed().0, index as u64);
        assert_eq!(pair.client.completed(), (index as u64, Completed::Send));
    }
    pair.client.quiet();
    pair.server.receive(0..1);
    pair.client.post(SendOp::Send, 0, 4);
    assert_eq!(pair.client.completed().1, Completed::Send);

    let local = Slice { region: &pair.client.inbox, offset: 0, len: 64 };
    let receives: Vec<_> = (0..500).map(|id| RecvRequest { id, local }).collect();
    let error = pair.client.qp.post_recv(&receives).unwrap_err();
    assert_eq!(error.error.kind(), ErrorKind::QueueFull);
    println!("a receive queue for 40 took {}", error.posted);
    assert!((40..500).contains(&error.posted));
}

#[test]
fn slices_are_checked_before_anything_reaches_the_device() {
    let Some(lab) = lab() else { return };
    let pair = lab.pair();
    let (client, server) = (&pair.client, &pair.server);
    let good = client.request(1, SendOp::Send, 0, 4);
    let outside = client.request(2, SendOp::Send, LEN - 3, 4);
    let foreign = SendRequest { local: Slice { region: &server.region, offset: 0, len: 4 }, ..good };
    let long =
        SendRequest { local: Slice { region: &client.region, offset: 0, len: 4096 }, inline: true, ..good };
    let inline_read = SendRequest { op: SendOp::Read(server.remote(0)), inline: true, ..good };
    let overflow = client.request(3, SendOp::WriteImmediate(server.remote(0), Immediate(0)), usize::MAX, 2);
    for bad in [outside, foreign, long, inline_read, overflow] {
        let error = client.qp.post_send(&[good, good, bad, good]).unwrap_err();
        println!("{}", error.error);
        assert_eq!((error.posted, error.error.kind()), (2, ErrorKind::Argument));
        for _ in 0..2 {
            assert_eq!(client.completed(), (1, Completed::Send));
            server.completed();
        }
        client.quiet();
    }
    let local = Slice { region: &server.region, offset: 0, len: 64 };
    let error = client.qp.post_recv(&[RecvRequest { id: 1, local }]).unwrap_err();
    assert_eq!((error.posted, error.error.kind()), (0, ErrorKind::Argument));
}

#[test]
fn impossible_sizes_are_refused() {
    let Some(lab) = lab() else { return };
    let pair = lab.pair();
    let id = &pair.client.id;
    let caps = id.capabilities().unwrap();
    for depth in [caps.max_completions.saturating_add(1), u32::MAX] {
        let error = id.create_completion_queue(depth, 0).unwrap_err();
        println!("{error}");
        assert_eq!(error.kind(), ErrorKind::Argument);
    }
    assert!(id.create_completion_queue(16, u32::MAX).is_ok());
    let other = crate::harness::resolved(&pair.clients, None, pair.listener.local_addr().unwrap());
    let (domain, cq) = (other.create_domain().unwrap(), other.create_completion_queue(16, 0).unwrap());
    let limits = QueuePairLimits { send_depth: caps.max_queue_depth + 1, recv_depth: 16, inline: 0 };
    let error = other.create_queue_pair(&domain, &cq, limits).unwrap_err();
    println!("{error}");
    assert_eq!(error.kind(), ErrorKind::Argument);
    assert_eq!(pair.client.domain.register(0, Access::NONE).unwrap_err().kind(), ErrorKind::Argument);
    assert_eq!(pair.client.domain.register(1 << 50, Access::NONE).unwrap_err().kind(), ErrorKind::Memory);
}

#[test]
fn the_limit_on_locked_memory_is_named() {
    let Some(lab) = lab() else { return };
    let pair = lab.pair();
    without_the_right_to_lock(64 * 1024, || {
        let error = pair.client.domain.register(1 << 20, Access::LOCAL_WRITE).unwrap_err();
        println!("{error}");
        assert_eq!(error.kind(), ErrorKind::Memory);
        let text = error.to_string();
        assert!(text.contains("1048576") && text.contains("65536"), "{text}");
    });
}

/// Runs `f` with this limit on locked memory, on a thread without CAP_IPC_LOCK to override it.
fn without_the_right_to_lock(limit: u64, f: impl FnOnce() + Send) {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    const VERSION_3: u32 = 0x2008_0522;
    const CAP_IPC_LOCK: u32 = 14;
    let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit(2): one live structure.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut old) }, 0);
    let new = libc::rlimit { rlim_cur: limit, ..old };
    // SAFETY: setrlimit(2): one live structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const new) }, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut header = Header { version: VERSION_3, pid: 0 };
            // Effective, permitted, inheritable; twice, for 64 capabilities.
            let mut sets = [0_u32; 6];
            // SAFETY: capget(2) of version 3: a header and two structures of three words.
            let got = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, sets.as_mut_ptr()) };
            assert_eq!(got, 0);
            sets[0] &= !(1 << CAP_IPC_LOCK);
            // SAFETY: capset(2) of version 3: a header and two structures of three words.
            let set = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, sets.as_ptr()) };
            assert_eq!(set, 0);
            f();
        });
    });
    // SAFETY: setrlimit(2): one live structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const old) }, 0);
}
