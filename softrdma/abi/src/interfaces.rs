//! Adds the devices to the machine's interfaces, `getifaddrs(3)`: one interface for each device,
//! with its addresses.
//!
//! Some programs look among the interfaces for addresses that a device may have. Those of softrdma
//! are on no real interface, so they are appended to the C library's list, as an interface with the
//! device's name.

use core::ffi::{c_char, c_int, c_void};
use core::mem::{transmute, zeroed};
use core::ptr;
use core::sync::atomic::AtomicPtr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};

use libc::{ifaddrs, sockaddr_storage};
use softrdma_wire::{ADDRESSES, parse_devices};

use crate::address;
use crate::link::set_errno;
use crate::view::behind;

/// An interface's address, with everything that its entry points to.
#[repr(C)]
struct Interface {
    /// The entry that programs have a pointer to.
    listed: ifaddrs,
    address: sockaddr_storage,
    mask: sockaddr_storage,
    name: [c_char; libc::IFNAMSIZ],
}

/// For each list that a program holds: the address of its first entry, and that of our first entry
/// in it.
static LISTS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Makes an entry for an address of the device with this number. [`free`] frees it.
fn entry(number: usize, ip: IpAddr, next: *mut ifaddrs) -> *mut ifaddrs {
    // SAFETY: the structure has integers, pointers, and arrays and unions of these.
    let mut made: Box<Interface> = Box::new(unsafe { zeroed() });
    let name = format!("softrdma{number}");
    // The last byte stays 0.
    for (to, from) in made.name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = from as c_char;
    }
    let mask = match ip {
        IpAddr::V4(_) => Ipv4Addr::from_bits(!0 << 8).into(),
        IpAddr::V6(_) => Ipv6Addr::from_bits(!0 << 64).into(),
    };
    // SAFETY: both are places for any address.
    unsafe {
        address::write(SocketAddr::new(ip, 0), &raw mut made.address);
        address::write(SocketAddr::new(mask, 0), &raw mut made.mask);
    }
    let made = Box::into_raw(made);
    // SAFETY: just made, and not shared yet.
    unsafe {
        let listed = &raw mut (*made).listed;
        (*listed).ifa_next = next;
        (*listed).ifa_name = (&raw mut (*made).name).cast();
        (*listed).ifa_flags = (libc::IFF_UP | libc::IFF_RUNNING | libc::IFF_MULTICAST).cast_unsigned();
        (*listed).ifa_addr = (&raw mut (*made).address).cast();
        (*listed).ifa_netmask = (&raw mut (*made).mask).cast();
    }
    made.cast()
}

/// Frees a list of entries that [`entry`] made.
///
/// # Safety
/// The caller gives up the list.
unsafe fn free(mut list: *mut ifaddrs) {
    while !list.is_null() {
        // SAFETY: made by `entry`, in a box, as the caller vouches.
        let made = unsafe { Box::from_raw(list.cast::<Interface>()) };
        list = made.listed.ifa_next;
    }
}

/// Makes the entries of the program's devices, from the last to the first.
fn of_devices() -> *mut ifaddrs {
    let devices =
        std::env::var(ADDRESSES).ok().and_then(|text| parse_devices(&text).ok()).unwrap_or_default();
    let each = devices.iter().enumerate().flat_map(|(number, own)| own.iter().map(move |ip| (number, *ip)));
    each.fold(ptr::null_mut(), |next, (number, ip)| entry(number, ip, next))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getifaddrs(into: *mut *mut ifaddrs) -> c_int {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let function = behind(c"getifaddrs", &FOUND);
    if function.is_null() {
        set_errno(libc::ENOSYS);
        return -1;
    }
    // SAFETY: not null; the C library's function of this name has this prototype.
    let function =
        unsafe { transmute::<*mut c_void, unsafe extern "C" fn(*mut *mut ifaddrs) -> c_int>(function) };
    // SAFETY: getifaddrs(3): a place for the list.
    let listed = unsafe { function(into) };
    if listed != 0 {
        return listed;
    }
    let ours = of_devices();
    // SAFETY: getifaddrs(3): `into` now has a list, whose last entry has a null successor.
    unsafe {
        let mut end = into;
        while !(*end).is_null() {
            end = &raw mut (**end).ifa_next;
        }
        *end = ours;
        if !ours.is_null() {
            let mut lists = LISTS.lock().unwrap_or_else(PoisonError::into_inner);
            lists.push(((*into).addr(), ours.expose_provenance()));
        }
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeifaddrs(list: *mut ifaddrs) {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let mut lists = LISTS.lock().unwrap_or_else(PoisonError::into_inner);
    let known = lists.iter().position(|(first, _)| *first == list.addr());
    let ours =
        known.map_or(ptr::null_mut(), |known| ptr::with_exposed_provenance_mut(lists.swap_remove(known).1));
    drop(lists);
    let function = behind(c"freeifaddrs", &FOUND);
    if list != ours && !function.is_null() {
        // SAFETY: not null; the C library's function of this name has this prototype.
        let function = unsafe { transmute::<*mut c_void, unsafe extern "C" fn(*mut ifaddrs)>(function) };
        // SAFETY: freeifaddrs(3): a list of `getifaddrs`, which the caller gives up. The C library
        // frees only its own entries: all of them are one block.
        unsafe { function(list) };
    }
    // SAFETY: made by `entry`, for this list.
    unsafe { free(ours) };
}
