//! The limit on locked memory, `RLIMIT_MEMLOCK` of `getrlimit(2)`, if the program is to have it.
//!
//! Linux pins the pages of a region, and counts them for the process. Beyond the limit, it refuses
//! further ones to a program without `CAP_IPC_LOCK`. Here pages are counted, and not pinned.

use core::ffi::c_int;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use std::sync::LazyLock;

use rustix::process::{Resource, getrlimit};
use softrdma_wire::MEMLOCK;

const PAGE: u64 = 4096;

/// Bytes in pages of regions. A page counts for each region that it is in.
static LOCKED: AtomicU64 = AtomicU64::new(0);

static APPLIES: LazyLock<bool> = LazyLock::new(|| std::env::var_os(MEMLOCK).is_some());

fn pages(at: u64, len: usize) -> u64 {
    let end = at.saturating_add(len as u64).checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
    end - at / PAGE * PAGE
}

/// Counts the pages of a region. `ENOMEM` beyond the limit.
pub(crate) fn lock(at: u64, len: usize) -> Result<(), c_int> {
    if !*APPLIES {
        return Ok(());
    }
    let limit = getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX);
    let within = |locked: u64| locked.checked_add(pages(at, len)).filter(|locked| *locked <= limit);
    LOCKED.fetch_update(Relaxed, Relaxed, within).map(drop).map_err(|_| libc::ENOMEM)
}

/// Ends the count of a region.
pub(crate) fn unlock(at: u64, len: usize) {
    if *APPLIES {
        LOCKED.fetch_sub(pages(at, len), Relaxed);
    }
}

/// A forked child has no regions.
pub(crate) fn forget() {
    LOCKED.store(0, Relaxed);
}
