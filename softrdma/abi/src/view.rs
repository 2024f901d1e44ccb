//! Shows programs the devices in `/dev/infiniband` and `/sys/class/infiniband`.
//!
//! `softrdma run` writes a folder with the files that a kernel would show there
//! ([`softrdma_wire::VIEW`]). This module has the C library's functions that take a path, in front
//! of the real ones. They look in that folder for those places, and pass on any other path.
//!
//! Programs call them in signal handlers, on small stacks, and between fork and exec. So they
//! allocate nothing, and take no lock: a constructor finds the real functions. Only another
//! library's constructor may call one before that, which then takes the dynamic linker's lock
//! (`dlsym(3)`).

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use softrdma_wire::VIEW;

use crate::reachable;

/// The places that the folder replaces, each with everything in it.
const SHOWN: [&[u8]; 3] = [b"/sys/class/infiniband", b"/sys/class/infiniband_verbs", b"/dev/infiniband"];

const LONGEST: usize = libc::PATH_MAX as usize;

/// A buffer for a path in the folder.
type Room = [u8; LONGEST];

/// Returns whether a path is one of the places, or in one.
fn is_shown(path: &[u8]) -> bool {
    let within = |place: &[u8]| path.strip_prefix(place).is_some_and(|rest| matches!(rest, [] | [b'/', ..]));
    SHOWN.into_iter().any(within)
}

/// Returns the path in the folder, with its terminating null byte, if there is room for it. `copy`
/// copies the asked path, as much as there is room for, and returns how much that was.
fn place_in<'a>(
    folder: &[u8],
    copy: impl FnOnce(&mut [u8]) -> Option<usize>,
    room: &'a mut Room,
) -> Option<&'a CStr> {
    let (front, back) = room.split_at_mut_checked(folder.len())?;
    front.copy_from_slice(folder);
    let end = copy(back)?;
    *back.get_mut(end)? = 0;
    CStr::from_bytes_until_nul(room).ok()
}

/// Returns whether a path is one of the places, or in one.
///
/// # Safety
/// `path` is null, a string of C, or no memory.
unsafe fn is_elsewhere(path: *const c_char) -> bool {
    // The longest place, and the byte behind it.
    let mut front = [0; SHOWN[1].len() + 1];
    // SAFETY: the caller vouches for `path`.
    let len = if path.is_null() { None } else { unsafe { reachable::front(path, &mut front) } };
    len.and_then(|len| front.get(..len)).is_some_and(is_shown)
}

/// Passes on a path of one of the places: in the folder, if there is one.
///
/// Not inlined, as the buffer is larger than some stacks.
///
/// # Safety
/// `path` is a string of C, or no memory from some byte on.
#[inline(never)]
unsafe fn elsewhere<T>(path: *const c_char, pass: impl FnOnce(*const c_char) -> T) -> T {
    let mut room = [0; LONGEST];
    // SAFETY: getenv(3): a name; the value is copied at once.
    let folder = unsafe { libc::getenv(VIEW.as_ptr()) };
    if folder.is_null() {
        return pass(path);
    }
    // SAFETY: getenv(3): a string.
    let folder = unsafe { CStr::from_ptr(folder) }.to_bytes();
    // SAFETY: the caller vouches for `path`.
    let copy = |into: &mut [u8]| unsafe { reachable::front(path, into) };
    pass(place_in(folder, copy, &mut room).map_or(path, CStr::as_ptr))
}

/// Returns the C library's function of this name, which ours hides.
pub(crate) fn behind(name: &CStr, found: &AtomicPtr<c_void>) -> *mut c_void {
    let mut function = found.load(Relaxed);
    if function.is_null() {
        // SAFETY: dlsym(3): a name.
        function = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
        found.store(function, Relaxed);
    }
    function
}

/// The name of a function, as C has it.
macro_rules! name {
    ($name:ident) => {
        const {
            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("no null byte within"),
            }
        }
    };
}

/// Defines functions that take a path, each with its result if the C library lacks it, and with
/// what may open one of the places instead.
macro_rules! seen {
    ($(fn $name:ident($($before:ident: $first:ty,)* @path $(, $after:ident: $last:ty)*) -> $result:ty = $none:expr
        $(, or $instead:path)?;)*) => {
        /// The C library's functions.
        struct Behind {
            $($name: AtomicPtr<c_void>,)*
        }

        static BEHIND: Behind = Behind { $($name: AtomicPtr::new(ptr::null_mut()),)* };

        extern "C" fn find_all() {
            $(behind(name!($name), &BEHIND.$name);)*
        }

        $(
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(
                $($before: $first,)* path: *const c_char $(, $after: $last)*
            ) -> $result {
                type Function = unsafe extern "C" fn($($first,)* *const c_char $(, $last)*) -> $result;
                let function = behind(name!($name), &BEHIND.$name);
                if function.is_null() {
                    crate::link::set_errno(libc::ENOSYS);
                    return $none;
                }
                // SAFETY: not null; the C library's function of this name has this prototype. Its
                // last argument may be optional (open(2)); it is passed in the register in which it
                // came (System V ABI, AAPCS64).
                let function = unsafe { core::mem::transmute::<*mut c_void, Function>(function) };
                // SAFETY: the caller meets the contract of the C library's function.
                let pass = |path| unsafe { function($($before,)* path $(, $after)*) };
                // SAFETY: as above: the path is a string, or null if that function allows it. An
                // address without memory is an error of that function.
                unsafe {
                    if !is_elsewhere(path) {
                        return pass(path);
                    }
                    $(if let Some(result) = $instead(path) {
                        return result;
                    })?
                    elsewhere(path, pass)
                }
            }
        )*
    };
}

/// The dynamic linker calls it before the program begins (System V ABI, `.init_array`).
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = find_all;

seen! {
    fn open(@path, flags: c_int, mode: c_uint) -> c_int = -1, or crate::device_file::opened;
    fn open64(@path, flags: c_int, mode: c_uint) -> c_int = -1, or crate::device_file::opened;
    fn openat(directory: c_int, @path, flags: c_int, mode: c_uint) -> c_int = -1;
    fn openat64(directory: c_int, @path, flags: c_int, mode: c_uint) -> c_int = -1;
    fn __open_2(@path, flags: c_int) -> c_int = -1;
    fn __open64_2(@path, flags: c_int) -> c_int = -1;
    fn fopen(@path, mode: *const c_char) -> *mut c_void = ptr::null_mut();
    fn fopen64(@path, mode: *const c_char) -> *mut c_void = ptr::null_mut();
    fn opendir(@path) -> *mut c_void = ptr::null_mut();
    fn access(@path, mode: c_int) -> c_int = -1;
    fn readlink(@path, into: *mut c_char, size: usize) -> isize = -1;
    fn getxattr(@path, name: *const c_char, into: *mut c_void, size: usize) -> isize = -1;
    fn lgetxattr(@path, name: *const c_char, into: *mut c_void, size: usize) -> isize = -1;
    fn realpath(@path, into: *mut c_char) -> *mut c_char = ptr::null_mut();
    fn __realpath_chk(@path, into: *mut c_char, size: usize) -> *mut c_char = ptr::null_mut();
    fn stat(@path, into: *mut c_void) -> c_int = -1;
    fn stat64(@path, into: *mut c_void) -> c_int = -1;
    fn lstat(@path, into: *mut c_void) -> c_int = -1;
    fn lstat64(@path, into: *mut c_void) -> c_int = -1;
    fn fstatat(directory: c_int, @path, into: *mut c_void, flags: c_int) -> c_int = -1;
    fn fstatat64(directory: c_int, @path, into: *mut c_void, flags: c_int) -> c_int = -1;
    fn statx(directory: c_int, @path, flags: c_int, mask: c_uint, into: *mut c_void) -> c_int = -1;
    fn __xstat(version: c_int, @path, into: *mut c_void) -> c_int = -1;
    fn __xstat64(version: c_int, @path, into: *mut c_void) -> c_int = -1;
    fn __lxstat(version: c_int, @path, into: *mut c_void) -> c_int = -1;
    fn __lxstat64(version: c_int, @path, into: *mut c_void) -> c_int = -1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_places_of_rdma_are_looked_for_elsewhere() {
        for path in ["/sys/class/infiniband", "/sys/class/infiniband/a/ports", "/dev/infiniband/uverbs0"] {
            assert!(is_shown(path.as_bytes()), "{path}");
        }
        for path in ["", "/", "/sys/class", "/sys/class/infiniband_mad", "/dev/infinibands", "dev/infiniband"]
        {
            assert!(!is_shown(path.as_bytes()), "{path}");
        }
    }

    #[test]
    fn a_path_without_room_stays_where_it_is() {
        let mut room = [1; LONGEST];
        let fits = vec![b'a'; LONGEST - 1 - b"/dev/infiniband".len()];
        let copy = |path: &'static [u8]| {
            move |into: &mut [u8]| {
                let len = path.len().min(into.len());
                into[..len].copy_from_slice(&path[..len]);
                Some(len)
            }
        };
        let asked = b"/dev/infiniband";
        let placed = place_in(&fits, copy(asked), &mut room).expect("there is room");
        assert!(placed.to_bytes().ends_with(b"a/dev/infiniband"));
        assert_eq!(placed.to_bytes().len(), LONGEST - 1);
        let longer = [&fits[..], b"a"].concat();
        assert!(place_in(&longer, copy(asked), &mut room).is_none());
        assert!(place_in(&[b'a'; LONGEST + 1], copy(b""), &mut room).is_none());
        assert!(place_in(b"/view", |_| None, &mut room).is_none());
    }
}
