//! `/dev/infiniband/rdma_cm`: a program's own librdmacm runs above softrdma as above Linux.
//!
//! An open file is an event channel of the fabric, whose descriptor becomes readable when there is
//! an event. This module has the C library's functions that the file is used by, in front of the
//! real ones. They pass on every other descriptor after one look at a table, without a lock:
//! programs call them in signal handlers, and between fork and exec.
//!
//! Only the library of `softrdma run --rsockets` exports them (`versions.map`).

use core::ffi::{c_char, c_int, c_void};
use core::mem::transmute;
use core::ptr;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd as _, IntoRawFd as _, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use softrdma_wire::{Name, Request};

use crate::commands::carry_out;
use crate::link::{ask, make_channel, set_errno};
use crate::process::PerProcess;
use crate::reachable::{self, is_readable};
use crate::view::behind;

/// The files that a process has open, and their identifiers.
#[derive(Default)]
pub(crate) struct Files {
    /// Each file's event channel, by the descriptor.
    channels: BTreeMap<RawFd, Channel>,
    /// By their handles.
    identifiers: Vec<Option<Held>>,
}

struct Channel {
    name: Name,
    /// What its descriptor is of, as fstat(2) tells.
    identity: Option<(libc::dev_t, libc::ino_t)>,
}

/// An identifier of the connection manager.
pub(crate) struct Held {
    pub(crate) name: Name,
    /// The channel on which it gets its events.
    pub(crate) channel: Name,
    /// What its events carry, so that librdmacm finds it. 0 until it was accepted.
    pub(crate) uid: u64,
    /// How many events were reported. Its destruction waits in librdmacm until the program has
    /// acknowledged them.
    pub(crate) reported: u32,
    /// The acknowledgement timeout that the program has set.
    pub(crate) timeout: Option<u8>,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) remote: Option<SocketAddr>,
}

impl Held {
    pub(crate) const fn new(name: Name, channel: Name, uid: u64) -> Self {
        Self { name, channel, uid, reported: 0, timeout: None, local: None, remote: None }
    }
}

impl Files {
    pub(crate) fn channel(&self, file: RawFd) -> Result<Name, c_int> {
        self.channels.get(&file).map(|channel| channel.name).ok_or(libc::EBADF)
    }

    /// Gives an identifier a handle, the lowest that is free.
    pub(crate) fn hold(&mut self, held: Held) -> Result<u32, c_int> {
        let free = self.identifiers.iter().position(Option::is_none).unwrap_or(self.identifiers.len());
        match self.identifiers.get_mut(free) {
            Some(place) => *place = Some(held),
            None => self.identifiers.push(Some(held)),
        }
        u32::try_from(free).map_err(|_| libc::ENOMEM)
    }

    pub(crate) fn held(&mut self, handle: u32) -> Result<&mut Held, c_int> {
        let place = usize::try_from(handle).ok().and_then(|handle| self.identifiers.get_mut(handle));
        place.and_then(Option::as_mut).ok_or(libc::ENOENT)
    }

    pub(crate) fn named(&mut self, name: Name) -> Option<(u32, &mut Held)> {
        let mut held = (0..).zip(self.identifiers.iter_mut().map(Option::as_mut));
        held.find_map(|(handle, held)| Some((handle, held.filter(|held| held.name == name)?)))
    }

    pub(crate) fn release(&mut self, handle: u32) {
        if let Some(place) = usize::try_from(handle).ok().and_then(|handle| self.identifiers.get_mut(handle))
        {
            *place = None;
        }
    }

    /// Forgets a file, and destroys its event channel with the identifiers on it.
    fn close(&mut self, file: RawFd) {
        if let Some((word, bit)) = mark(file) {
            word.fetch_and(!bit, Relaxed);
        }
        let Some(Channel { name: channel, .. }) = self.channels.remove(&file) else { return };
        for place in &mut self.identifiers {
            if let Some(held) = place.take_if(|held| held.channel == channel) {
                // If the fabric is gone, so are its objects.
                let _gone = ask(&Request::DestroyIdentifier(held.name));
            }
        }
        let _gone = ask(&Request::DestroyEventChannel(channel));
    }
}

pub(crate) static FILES: PerProcess<Mutex<Files>> = PerProcess::new();

pub(crate) fn files() -> MutexGuard<'static, Files> {
    FILES.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// The bytes of the longest command: a header, and a body whose length has 16 bits.
const LONGEST: usize = 8 + u16::MAX as usize;

/// A bit for each descriptor that may be one of the files. Others are never looked up.
static MARKED: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

/// Returns the descriptor's word of the table, and its bit.
fn mark(file: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let file = usize::try_from(file).ok()?;
    Some((MARKED.get(file / 64)?, 1 << (file % 64)))
}

/// Returns whether a descriptor is one of the files.
///
/// A child between `vfork(2)` and `execve(2)` has its parent's memory, but descriptors of its own.
/// A program may also close one, and use its number for another, by calls that are not replaced
/// here (`dup2(2)`, `close_range(2)`). Then the file is closed, too.
fn is_file(file: RawFd) -> bool {
    let marked = mark(file).is_some_and(|(word, bit)| word.load(Relaxed) & bit != 0);
    // SAFETY: getpid(2) cannot fail.
    if !marked || OWNER.load(Relaxed) != u64::from(unsafe { libc::getpid() }.cast_unsigned()) {
        return false;
    }
    let mut files = files();
    let is_it = files.channels.get(&file).is_some_and(|channel| channel.identity == identity(file));
    if !is_it {
        files.close(file);
    }
    is_it
}

/// Returns what a descriptor is of; `None` if it is closed.
fn identity(file: RawFd) -> Option<(libc::dev_t, libc::ino_t)> {
    // SAFETY: zero is a valid value of a structure of integers.
    let mut told: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: fstat(2): a place for the answer.
    let result = unsafe { real_fstat(file, &raw mut told) };
    (result == 0).then_some((told.st_dev, told.st_ino))
}

/// The process that has opened the files.
static OWNER: AtomicU64 = AtomicU64::new(0);

/// Whether the file is there.
static SERVED: AtomicBool = AtomicBool::new(false);

/// Opens the file if `path` is that of the file, and the file is there.
///
/// # Safety
/// `path` is a string of C, or no memory from some byte on.
pub(crate) unsafe fn opened(path: *const c_char) -> Option<c_int> {
    const PATH: &[u8] = b"/dev/infiniband/rdma_cm";
    let mut front = [0; PATH.len() + 1];
    // SAFETY: the caller vouches for `path`.
    let is_it = SERVED.load(Relaxed)
        && unsafe { reachable::front(path, &mut front) }.and_then(|len| front.get(..len)) == Some(PATH);
    is_it.then(|| {
        open().unwrap_or_else(|errno| {
            set_errno(errno);
            -1
        })
    })
}

fn open() -> Result<c_int, c_int> {
    let (name, descriptor) = make_channel(&Request::CreateEventChannel, Request::DestroyEventChannel)?;
    let Some((word, bit)) = mark(descriptor.as_raw_fd()) else {
        let _gone = ask(&Request::DestroyEventChannel(name));
        return Err(libc::EMFILE);
    };
    let file = descriptor.into_raw_fd();
    OWNER.store(std::process::id().into(), Relaxed);
    // One that was closed behind this library's back may have had the number.
    let mut files = files();
    files.close(file);
    files.channels.insert(file, Channel { name, identity: identity(file) });
    word.fetch_or(bit, Relaxed);
    Ok(file)
}

/// Returns the device number of the file that Linux itself has, if it has one. librdmacm learns it
/// from Linux, and opens no file of another number.
fn number() -> Option<libc::dev_t> {
    parse(&std::fs::read_to_string("/sys/class/misc/rdma_cm/dev").ok()?)
}

fn parse(number: &str) -> Option<libc::dev_t> {
    let (major, minor) = number.trim_end().split_once(':')?;
    Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// The C library's functions.
struct Behind {
    write: AtomicPtr<c_void>,
    close: AtomicPtr<c_void>,
    fstat: AtomicPtr<c_void>,
    fstat64: AtomicPtr<c_void>,
}

static BEHIND: Behind = Behind {
    write: AtomicPtr::new(ptr::null_mut()),
    close: AtomicPtr::new(ptr::null_mut()),
    fstat: AtomicPtr::new(ptr::null_mut()),
    fstat64: AtomicPtr::new(ptr::null_mut()),
};

/// Makes the file be there. The library that exports the functions calls this before the program
/// begins.
pub extern "C" fn serve() {
    behind(c"write", &BEHIND.write);
    behind(c"close", &BEHIND.close);
    behind(c"fstat", &BEHIND.fstat);
    behind(c"fstat64", &BEHIND.fstat64);
    SERVED.store(true, Relaxed);
}

/// Fails because the C library lacks a function.
fn absent() -> c_int {
    set_errno(libc::ENOSYS);
    -1
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(file: c_int, from: *const c_void, len: usize) -> isize {
    // Another address is an error of the C library's function.
    if is_file(file) && reachable::all(from.addr(), len.min(LONGEST), is_readable) {
        // SAFETY: write(2): so many bytes, which can be read, and which the program does not change
        // meanwhile.
        let command = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len.min(LONGEST)) };
        // SAFETY: the program names memory of its own for the answer (rdma/rdma_user_cm.h).
        return match unsafe { carry_out(file, command) } {
            Ok(()) => isize::try_from(len).unwrap_or(isize::MAX),
            Err(errno) => {
                set_errno(errno);
                -1
            }
        };
    }
    let function = behind(c"write", &BEHIND.write);
    if function.is_null() {
        return absent() as isize;
    }
    // SAFETY: the C library's function of this name has this prototype.
    let function = unsafe {
        transmute::<*mut c_void, unsafe extern "C" fn(c_int, *const c_void, usize) -> isize>(function)
    };
    // SAFETY: the caller meets the contract of the C library's function.
    unsafe { function(file, from, len) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(file: c_int) -> c_int {
    if is_file(file) {
        files().close(file);
    }
    let function = behind(c"close", &BEHIND.close);
    if function.is_null() {
        return absent();
    }
    // SAFETY: the C library's function of this name has this prototype.
    let function = unsafe { transmute::<*mut c_void, unsafe extern "C" fn(c_int) -> c_int>(function) };
    // SAFETY: the caller meets the contract of the C library's function.
    unsafe { function(file) }
}

/// Defines functions that describe a descriptor: the file is a device.
macro_rules! described {
    ($($name:ident $words:literal $stat:ident $real:ident;)*) => {
        $(
            /// Calls the C library's function.
            ///
            /// # Safety
            /// That of the C library's function.
            unsafe fn $real(file: c_int, into: *mut libc::$stat) -> c_int {
                type Function = unsafe extern "C" fn(c_int, *mut libc::$stat) -> c_int;
                let function = behind($words, &BEHIND.$name);
                if function.is_null() {
                    return absent();
                }
                // SAFETY: the C library's function of this name has this prototype.
                let function = unsafe { transmute::<*mut c_void, Function>(function) };
                // SAFETY: the caller meets its contract.
                unsafe { function(file, into) }
            }

            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(file: c_int, into: *mut libc::$stat) -> c_int {
                // SAFETY: the caller meets the contract of the C library's function.
                let result = unsafe { $real(file, into) };
                if result == 0 && is_file(file) {
                    // SAFETY: fstat(2) has filled it in.
                    let told = unsafe { &mut *into };
                    told.st_mode = libc::S_IFCHR | 0o666;
                    told.st_rdev = number().unwrap_or(told.st_rdev);
                }
                result
            }
        )*
    };
}

described! {
    fstat c"fstat" stat real_fstat;
    fstat64 c"fstat64" stat64 real_fstat64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_number_is_read_as_sysfs_has_it() {
        assert_eq!(parse("10:258\n"), Some(libc::makedev(10, 258)));
        assert_eq!(parse("10\n").or(parse("")).or(parse("a:b")), None);
    }
}
