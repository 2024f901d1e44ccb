use core::sync::atomic::AtomicU8;
use std::os::fd::AsRawFd;

use rdma_backend::memory::{CallerMemory, DmaBuf, SharedMemory};
use rdma_backend::{Access, Domain as _, ErrorKind, Failure as _};

use crate::harness::lab;

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
