//! What children of `fork(3)` have, and what they have not. A child here makes system calls and
//! nothing else, and tells by its exit status what it found.
#![allow(unsafe_code, reason = "fork(2)")]

use std::fs::File;
use std::io::{PipeReader, Read as _, Write as _, pipe};
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rdma_process::{UnsharedFd, forks, is_child, watch_forks};

/// A child of another test would have what this one has.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    watch_forks();
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the exit status of a child that does this.
fn child(does: impl FnOnce() -> i32) -> i32 {
    let mut status = 0;
    // SAFETY: fork(2): the child makes system calls only, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let found = does();
        // SAFETY: _exit(2) has no preconditions.
        unsafe { libc::_exit(found) };
    }
    // SAFETY: waitpid(2): a child, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "{status:#x}");
    libc::WEXITSTATUS(status)
}

/// Writes to a descriptor, and returns the error number; 0 for success.
fn written(descriptor: RawFd) -> i32 {
    // SAFETY: write(2): one byte.
    let count = unsafe { libc::write(descriptor, c"x".as_ptr().cast(), 1) };
    if count == 1 { 0 } else { std::io::Error::last_os_error().raw_os_error().unwrap_or(-1) }
}

fn private() -> (PipeReader, UnsharedFd) {
    let (reader, writer) = pipe().expect("a pipe");
    (reader, UnsharedFd::new(writer.into()))
}

#[test]
fn a_child_knows_that_it_is_one() {
    let _alone = alone();
    assert_eq!((is_child(), forks()), (false, 0));
    assert_eq!(child(|| i32::from(is_child())), 1);
    assert_eq!(child(|| child(|| forks().cast_signed())), 2);
    assert_eq!(child(|| child(|| i32::from(is_child()))), 1);
    assert!(!is_child());
}

/// The number stands for another file, so that no file of the child's gets it.
#[test]
fn a_child_has_no_private_descriptor() {
    let _alone = alone();
    let (mut reader, descriptor) = private();
    assert_eq!(child(|| written(descriptor.as_raw_fd())), libc::EINVAL);
    assert_eq!(written(descriptor.as_raw_fd()), 0);
    drop(descriptor);
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).expect("no writer is left");
    assert_eq!(bytes, b"x");
}

#[test]
fn a_child_that_lives_on_keeps_nothing_open() {
    let _alone = alone();
    let (reader, descriptor) = private();
    let (ends, mut end) = pipe().expect("a pipe");
    let (mut ready, is_ready) = pipe().expect("a pipe");
    // SAFETY: fork(2): the child makes system calls only, and ends.
    let lives = unsafe { libc::fork() };
    if lives == 0 {
        written(is_ready.as_raw_fd());
        // SAFETY: close(2), read(2), _exit(2): it ends with the parent's end, or by a byte.
        unsafe {
            libc::close(end.as_raw_fd());
            libc::read(ends.as_raw_fd(), [0_u8; 1].as_mut_ptr().cast(), 1);
            libc::_exit(0);
        }
    }
    ready.read_exact(&mut [0]).expect("the child lives");
    drop(descriptor);
    let mut polled = libc::pollfd { fd: reader.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: poll(2): one entry; it does not wait.
    unsafe { libc::poll(&raw mut polled, 1, 0) };
    assert_eq!(polled.revents, libc::POLLHUP, "no writer is left");
    end.write_all(b"x").expect("the child lives");
    // SAFETY: waitpid(2): a child, and no place for its status.
    assert_eq!(unsafe { libc::waitpid(lives, std::ptr::null_mut(), 0) }, lives);
}

/// What a child opens under such a number is its own, and its children have it.
#[test]
fn a_grandchild_has_what_the_child_opens() {
    let _alone = alone();
    let (_reader, descriptor) = private();
    let null = File::options().write(true).open("/dev/null").expect("is there");
    let number = descriptor.as_raw_fd();
    let found = child(|| {
        // SAFETY: dup2(2): two numbers.
        unsafe { libc::dup2(null.as_raw_fd(), number) };
        child(|| written(number))
    });
    assert_eq!(found, 0);
}

#[test]
fn a_closed_descriptor_leaves_its_number_to_others() {
    let _alone = alone();
    let (_reader, descriptor) = private();
    let number = descriptor.as_raw_fd();
    drop(descriptor);
    let null = File::options().write(true).open("/dev/null").expect("is there");
    // Another test harness thread may have taken the number meanwhile.
    if null.as_raw_fd() == number {
        assert_eq!(child(|| written(number)), 0);
    }
}

#[test]
fn threads_handle_no_signals() {
    let mut handled = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    let ask = |into: *mut libc::sigset_t| {
        // SAFETY: pthread_sigmask(3): no set, and a place for the present one.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), into) };
        // SAFETY: sigismember(3): the set that was just written.
        unsafe { libc::sigismember(into, libc::SIGINT) }
    };
    assert_eq!(ask(handled.as_mut_ptr()), 0);
    let thread = rdma_process::spawn("a-name", move || {
        let mut blocked = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
        assert_eq!(std::thread::current().name(), Some("a-name"));
        assert_eq!(ask(blocked.as_mut_ptr()), 1);
    });
    thread.expect("a thread").join().expect("no panic");
    assert_eq!(ask(handled.as_mut_ptr()), 0);
}
