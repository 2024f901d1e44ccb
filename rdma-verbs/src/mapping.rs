//! Pages of our own that regions are made of.

use core::ptr::{self, NonNull};

use rdma_backend::Pages;

use crate::error::{Error, Stage};

/// A huge page: the first of x86-64, and of AArch64 with pages of 4 KiB. A system with longer
/// reserved pages refuses such a mapping, and is advised instead.
const HUGE: usize = 2 << 20;

/// Anonymous pages, zeroed.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    pages: Pages,
}

// SAFETY: only its region reaches the bytes, as atomics; the mapping itself is never changed.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(len: usize) -> Result<Self, Error> {
        // SAFETY: sysconf(3) has no preconditions.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(4096);
        Self::map(whole(len, page)?, 0).map_err(|()| Error::last("mmap", Stage::Create))
    }

    /// Maps at least `len` bytes of huge pages: reserved ones, or usual ones advised to become
    /// huge. Less than one is mapped as usual: it would waste most of one.
    pub(crate) fn huge(len: usize) -> Result<Self, Error> {
        Self::reserved_or_advised(len, libc::MAP_HUGETLB)
    }

    fn reserved_or_advised(len: usize, reserved: i32) -> Result<Self, Error> {
        if len < HUGE {
            return Self::new(len);
        }
        let whole = whole(len, HUGE)?;
        if let Ok(mut mapping) = Self::map(whole, reserved) {
            mapping.pages = Pages::Huge;
            return Ok(mapping);
        }
        // Huge pages lie at multiples of their length: the surplus around them is given back.
        let room = whole.checked_add(HUGE).ok_or(TOO_LONG)?;
        let mut mapping = Self::map(room, 0).map_err(|()| Error::last("mmap", Stage::Create))?;
        mapping.trim(whole);
        // SAFETY: madvise(2): whole pages of this mapping; the advice changes no content.
        let advised =
            unsafe { libc::madvise(mapping.base.as_ptr().cast(), mapping.len, libc::MADV_HUGEPAGE) } == 0;
        mapping.pages = if advised { Pages::Advised } else { Pages::Usual };
        Ok(mapping)
    }

    fn map(len: usize, flags: i32) -> Result<Self, ()> {
        // SAFETY: mmap(2): fresh anonymous pages, at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags,
                -1,
                0,
            )
        };
        match NonNull::new(base.cast::<u8>()) {
            Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => {
                Ok(Self { base, len, pages: Pages::Usual })
            }
            _ => Err(()),
        }
    }

    /// Unmaps all but `len` bytes from the first multiple of [`HUGE`] on.
    fn trim(&mut self, len: usize) {
        let Some((before, after)) = surplus(self.base.as_ptr().addr(), self.len, len) else { return };
        let first = self.base.as_ptr();
        // SAFETY: `before` bytes, `len` and `after` are the mapping.
        let (kept, end) = unsafe { (first.add(before), first.add(before + len)) };
        for (part, length) in [(first, before), (end, after)] {
            if length > 0 {
                // SAFETY: munmap(2): whole pages of this mapping, not in use yet.
                unsafe { libc::munmap(part.cast(), length) };
            }
        }
        // SAFETY: inside of a mapping, so not null.
        self.base = unsafe { NonNull::new_unchecked(kept) };
        self.len = len;
    }

    pub(crate) const fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(crate) const fn pages(&self) -> Pages {
        self.pages
    }
}

const TOO_LONG: Error = Error::Argument("a region of this length does not fit into the address space");

/// Returns how many of the `mapped` bytes at `address` lie before and behind the first `len` that
/// begin at a multiple of [`HUGE`]. `None` if they do not fit.
fn surplus(address: usize, mapped: usize, len: usize) -> Option<(usize, usize)> {
    let before = address.wrapping_neg() % HUGE;
    let after = mapped.checked_sub(before)?.checked_sub(len)?;
    Some((before, after))
}

fn whole(len: usize, page: usize) -> Result<usize, Error> {
    if len == 0 {
        return Err(Error::Argument("a region has at least one byte"));
    }
    len.checked_next_multiple_of(page).filter(|len| isize::try_from(*len).is_ok()).ok_or(TOO_LONG)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: munmap(2): what was mapped and not given back, neither borrowed nor registered.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::AtomicU8;

    use rdma_backend::memory::SharedMemory;

    use super::*;

    fn bytes(mapping: &Mapping) -> SharedMemory<'_> {
        // SAFETY: pages of its own, mapped until the borrow ends, and reached as atomics only.
        SharedMemory::new(unsafe {
            core::slice::from_raw_parts(mapping.base().cast::<AtomicU8>(), mapping.len)
        })
    }

    #[test]
    fn mappings_are_whole_zeroed_pages() {
        let mapping = Mapping::new(1).unwrap();
        assert!(mapping.len >= 4096 && mapping.base().addr().is_multiple_of(4096));
        let memory = bytes(&mapping);
        let mut bytes = [1; 100];
        assert!(memory.read(0, &mut bytes) && bytes == [0; 100]);
        assert!(memory.write(99, &[7]) && !memory.write(mapping.len, &[7]));
    }

    #[test]
    fn huge_pages_are_aligned_or_not_taken() {
        let usual = Mapping::huge(HUGE - 1).unwrap();
        assert_eq!((usual.pages, usual.len), (Pages::Usual, HUGE));
        // There may be no reserved pages, and no transparent ones in the kernel.
        for len in [HUGE, HUGE + 1, 3 * HUGE] {
            let mapping = Mapping::huge(len).unwrap();
            println!("{len} bytes: {:?}", mapping.pages);
            assert!(mapping.len >= len && mapping.len.is_multiple_of(HUGE));
            assert!(mapping.base().addr().is_multiple_of(HUGE));
            let (memory, mut last) = (bytes(&mapping), [1]);
            assert!(memory.read(len - 1, &mut last) && last == [0]);
            assert!(memory.write(0, &[7]) && memory.write(mapping.len - 1, &[7]));
        }
    }

    /// Without the flag for reserved pages the first mapping succeeds on every machine.
    #[test]
    fn reserved_pages_stay_mapped() {
        let mapping = Mapping::reserved_or_advised(HUGE, 0).unwrap();
        assert_eq!((mapping.pages(), mapping.len), (Pages::Huge, HUGE));
        let (memory, mut last) = (bytes(&mapping), [1]);
        assert!(memory.write(0, &[7]) && memory.read(HUGE - 1, &mut last) && last == [0]);
    }

    #[test]
    fn what_is_trimmed_lies_around_the_huge_pages() {
        assert_eq!(surplus(HUGE, 2 * HUGE, HUGE), Some((0, HUGE)));
        assert_eq!(surplus(HUGE + 4096, 2 * HUGE, HUGE), Some((HUGE - 4096, 4096)));
        assert_eq!(surplus(HUGE + 4096, HUGE, HUGE), None);
        let mut mapping = Mapping::map(4 * HUGE, 0).unwrap();
        let first = mapping.base().addr();
        mapping.trim(HUGE);
        assert_eq!(mapping.base().addr(), first.next_multiple_of(HUGE));
        assert_eq!(mapping.len, HUGE);
    }

    #[test]
    fn impossible_lengths_are_refused() {
        for map in [Mapping::new, Mapping::huge] {
            for len in [0, usize::MAX, usize::MAX / 2 + 1] {
                assert!(matches!(map(len), Err(Error::Argument(_))), "{len}");
            }
            // A valid length that the kernel never grants.
            assert!(matches!(map(1 << 55), Err(Error::Call { call: "mmap", .. })));
        }
    }
}
