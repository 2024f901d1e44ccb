//! Memory of this process with a page that does not come until it is released (`userfaultfd(2)`).
#![allow(unsafe_code, reason = "mmap(2) and userfaultfd(2) have no safe wrapper")]

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::ptr;

use rustix::event::{PollFd, PollFlags, poll};

pub(crate) const PAGE: u64 = 4096;

/// Three pages, of which the middle one does not come. Never unmapped, as a thread may still access
/// them.
pub(crate) struct Pages {
    pub(crate) at: u64,
    /// When it is closed, the page comes like any other.
    fault: OwnedFd,
}

/// `struct uffdio_api` and `struct uffdio_register`.
#[repr(C)]
struct Api([u64; 3]);
#[repr(C)]
struct Register([u64; 4]);

impl Pages {
    /// Maps the pages. Prints a reason and returns `None` if the kernel does not allow it.
    pub(crate) fn new() -> Option<Self> {
        const UFFDIO_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
        const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00_u32 as libc::Ioctl;
        const MISSING: u64 = 1;
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: mmap(2): new memory, at a place that the kernel chooses.
        let at = unsafe { libc::mmap(ptr::null_mut(), 3 * PAGE as usize, protection, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED, "memory");
        for page in [0, 2] {
            // SAFETY: the address is inside the memory.
            unsafe { at.cast::<u8>().add(page * PAGE as usize).write_volatile(1) };
        }
        // SAFETY: userfaultfd(2): flags, and no pointers.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        let Ok(fd @ 0..) = i32::try_from(fd) else {
            println!("skipped: userfaultfd(2): {}", std::io::Error::last_os_error());
            return None;
        };
        // SAFETY: the call above made it, and it has no other owner.
        let fault = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut api = Api([0xaa, 0, 0]);
        let at = at.expose_provenance() as u64;
        let mut register = Register([at + PAGE, PAGE, MISSING, 0]);
        // SAFETY: UFFDIO_API(2const) and UFFDIO_REGISTER(2const): structures that they read and
        // write.
        let done = unsafe {
            libc::ioctl(fault.as_raw_fd(), UFFDIO_API, &raw mut api) == 0
                && libc::ioctl(fault.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) == 0
        };
        assert!(done, "{}", std::io::Error::last_os_error());
        Some(Self { at, fault })
    }

    /// Waits until a thread waits for the page.
    pub(crate) fn is_wanted(&self) {
        let wanted = poll(&mut [PollFd::new(&self.fault, PollFlags::IN)], None);
        assert_eq!(wanted, Ok(1));
    }

    /// Releases the page.
    pub(crate) fn let_go(self) {
        drop(self.fault);
    }
}
