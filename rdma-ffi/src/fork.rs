//! A forked child can use no handle: the device knows only the parent's memory, and a call on a
//! copied descriptor acts for the parent. So calls have no effect in a child.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Code, Failure};

static CHILD: AtomicBool = AtomicBool::new(false);

/// Called before the first handle exists.
pub(crate) fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: pthread_atfork(3): the handler exists while the library is loaded; glibc removes
        // it with the library. It does only what a signal handler may do: one store.
        let noticed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        assert_eq!(noticed, 0, "pthread_atfork finds no memory");
    });
}

unsafe extern "C" fn in_child() {
    CHILD.store(true, Ordering::Relaxed);
}

#[inline]
pub(crate) fn is_child() -> bool {
    CHILD.load(Ordering::Relaxed)
}

#[cold]
pub(crate) fn failure() -> Failure {
    let text = "the process that opened the RDMA device has forked, and this is its child: \
                nothing of the parent's can be used here";
    Failure::Here(Code::VKRDMA_FORKED, text.into())
}
