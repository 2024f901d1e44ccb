//! Devices: `ibv_get_device_list(3)`, `ibv_open_device(3)`, `ibv_query_device(3)` and similar
//! calls.
//!
//! A process has the devices of its machine, each with one port. Each device has one context,
//! however often it is opened.

use core::ffi::{c_char, c_int, c_uint, c_void};
use std::net::IpAddr;
use std::os::fd::AsRawFd as _;

pub(crate) use softrdma_wire::gid;
use softrdma_wire::{self as wire, MAX_ELEMENTS};

use crate::chain::{post_recv, post_send};
use crate::completion::{poll_cq, req_notify_cq};
use crate::layout::{
    _compat_ibv_port_attr, Device, DeviceEx, EXTENDED, GidEntry, IBV_ATOMIC_HCA, PORT_ATTRIBUTES,
    PortAttributes, VerbsContext, ibv_context, ibv_context_ops, ibv_device_attr, ibv_gid, ibv_mw,
    ibv_mw_bind, ibv_mw_type, ibv_pd, ibv_qp, zeroed,
};
use crate::link::{Attached, concluded, link, pointer, returned, set_errno};
use crate::missing::lacking;
use crate::pair::create_qp_ex;
use crate::polling::create_cq_ex;
use crate::shared::{create_srq_ex, post_srq_recv};

/// The number of a device's only port.
pub(crate) const PORT: u8 = 1;
/// The most scatter-gather elements of a work request.
pub(crate) const MAX_SGE: c_int = MAX_ELEMENTS as c_int;

const NODE_CA: c_int = 1;
const TRANSPORT_IB: c_int = 0;
const PORT_ACTIVE: c_uint = 4;
const MTU_4096: c_uint = 5;
const LINK_UP: u8 = 5;
const LINK_LAYER_ETHERNET: u8 = 2;
const WIDTH_4X: u8 = 2;
const SPEED_EDR: u8 = 32;
/// `IBV_GID_TYPE_ROCE_V2`.
const ROCE_V2: u32 = 2;

/// The address of a device and its context, which are leaked: they last as long as the process.
pub(crate) struct Opened(*mut Place);

/// A device with its context. It begins with the structure that programs point to, and so does its
/// context.
#[repr(C)]
struct Place {
    device: Device,
    /// The device's number on its machine.
    number: wire::Device,
    verbs: VerbsContext,
}

// SAFETY: the device never changes after it was made. Of the context, this library reads only what
// the headers' inline functions do not write, and ibv_open_device(3) tells programs that threads
// may share contexts.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

fn attached(number: wire::Device) -> Result<&'static Attached, c_int> {
    link()?.devices.get(number as usize).ok_or(libc::ENODEV)
}

/// Returns the number of the device with this context.
///
/// # Safety
/// `context` came from this library: from [`context_of`].
pub(crate) unsafe fn number_in(context: *const ibv_context) -> wire::Device {
    // SAFETY: its device is the first field of a place, and neither is ever freed.
    unsafe { (*(*context).device.cast::<Place>()).number }
}

/// Returns the device with this context. A forked child has its own.
///
/// # Safety
/// `context` came from this library: from [`context_of`].
pub(crate) unsafe fn attached_in(context: *const ibv_context) -> Result<&'static Attached, c_int> {
    // SAFETY: the caller's promise is that of `number_in`.
    attached(unsafe { number_in(context) })
}

/// Returns the number of this machine's device that has the address.
pub(crate) fn device_at(ip: IpAddr) -> Result<wire::Device, c_int> {
    let with = |(_, device): &(wire::Device, &Attached)| device.addresses.contains(&ip);
    (0..).zip(&link()?.devices).find(with).map(|(number, _)| number).ok_or(libc::ENODEV)
}

fn opened(number: wire::Device) -> Result<*mut Place, c_int> {
    let (attached, link) = (attached(number)?, link()?);
    let make = || {
        let mut device: Device = zeroed();
        device.node_type = NODE_CA;
        device.transport_type = TRANSPORT_IB;
        fill(&mut device.name, format!("softrdma{number}"));
        fill(&mut device.dev_name, format!("uverbs{number}"));
        fill(&mut device.dev_path, format!("/sys/class/infiniband_verbs/uverbs{number}"));
        fill(&mut device.ibdev_path, format!("/sys/class/infiniband/softrdma{number}"));
        let mut verbs: VerbsContext = zeroed();
        verbs.create_cq_ex = Some(create_cq_ex);
        verbs.query_device_ex = Some(query_device_ex);
        verbs.create_qp_ex = Some(create_qp_ex);
        verbs.create_srq_ex = Some(create_srq_ex);
        verbs.sz = size_of::<VerbsContext>();
        let context = &mut verbs.context;
        context.ops = operations();
        // Programs may pass this descriptor on, but no command can be sent through it.
        context.cmd_fd = attached.events.as_raw_fd();
        context.async_fd = attached.events.as_raw_fd();
        context.num_comp_vectors = c_int::try_from(link.limits.vectors).unwrap_or(1);
        context.abi_compat = EXTENDED;
        let place = Box::into_raw(Box::new(Place { device, number, verbs }));
        // SAFETY: just made, and no other thread has it yet.
        unsafe { (*place).verbs.context.device = (&raw mut (*place).device).cast() };
        Opened(place)
    };
    Ok(attached.opened.get_or_init(make).0)
}

/// Copies a text into a field of zeros that is longer than the text.
fn fill(field: &mut [c_char], with: impl AsRef<str>) {
    for (to, from) in field.iter_mut().zip(with.as_ref().bytes()) {
        *to = from as c_char;
    }
}

pub(crate) fn context_of(number: wire::Device) -> Result<*mut ibv_context, c_int> {
    let opened = opened(number)?;
    // SAFETY: a place inside what `opened` leaked; nothing is read.
    Ok(unsafe { &raw mut (*opened).verbs.context })
}

/// Returns the functions that the inline functions of the headers call.
fn operations() -> ibv_context_ops {
    ibv_context_ops {
        poll_cq: Some(poll_cq),
        req_notify_cq: Some(req_notify_cq),
        post_send: Some(post_send),
        post_recv: Some(post_recv),
        post_srq_recv: Some(post_srq_recv),
        alloc_mw: Some(alloc_mw),
        bind_mw: Some(bind_mw),
        dealloc_mw: Some(dealloc_mw),
        ..zeroed()
    }
}

macro_rules! lacking_operations {
    ($(fn $name:ident($($type:ty),*) -> $result:ty = $value:expr;)*) => {
        $(
            unsafe extern "C" fn $name($(_: $type),*) -> $result {
                static TOLD: core::sync::atomic::AtomicBool = core::sync::atomic::AtomicBool::new(false);
                lacking(stringify!($name), &TOLD);
                $value
            }
        )*
    };
}

lacking_operations! {
    fn alloc_mw(*mut ibv_pd, ibv_mw_type) -> *mut ibv_mw = core::ptr::null_mut();
    fn bind_mw(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int = libc::EOPNOTSUPP;
    fn dealloc_mw(*mut ibv_mw) -> c_int = libc::EOPNOTSUPP;
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut Device {
    // A place begins with its device. Without a fabric the list is empty, as on a machine without
    // devices.
    let devices = each_device(|number| opened(number).map(<*mut Place>::cast)).unwrap_or_default();
    // SAFETY: ibv_get_device_list(3): null, or a place for the count.
    pointer(unsafe { listed(devices, count) })
}

/// Collects the result of `of` for each device of the machine.
fn each_device<T>(of: impl FnMut(wire::Device) -> Result<T, c_int>) -> Result<Vec<T>, c_int> {
    (0..).take(link()?.devices.len()).map(of).collect()
}

/// Makes a list for C, from malloc, that ends with a null pointer.
///
/// # Safety
/// `count` is null or points to writable memory for the number of pointers.
unsafe fn listed<T>(mut pointers: Vec<*mut T>, count: *mut c_int) -> Result<*mut *mut T, c_int> {
    // SAFETY: the caller vouches for `count`.
    if let Some(count) = unsafe { count.as_mut() } {
        *count = c_int::try_from(pointers.len()).unwrap_or(c_int::MAX);
    }
    pointers.push(core::ptr::null_mut());
    // SAFETY: malloc(3): the size is not 0. Only the function that frees lists of this kind frees
    // it.
    let list: *mut *mut T = unsafe { libc::malloc(size_of_val(pointers.as_slice())) }.cast();
    if list.is_null() {
        return Err(libc::ENOMEM);
    }
    // SAFETY: `list` has room for this many pointers, and malloc aligns for them.
    unsafe { list.copy_from_nonoverlapping(pointers.as_ptr(), pointers.len()) };
    Ok(list)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut Device) {
    // SAFETY: ibv_free_device_list(3): a list from `ibv_get_device_list`, allocated by malloc.
    unsafe { libc::free(list.cast()) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_name(device: *mut Device) -> *const c_char {
    // SAFETY: ibv_get_device_name(3): a device of the list, which is never freed.
    unsafe { (&raw const (*device).name).cast() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_index(device: *mut Device) -> c_int {
    // SAFETY: ibv_get_device_index(3): a device of the list.
    c_int::try_from(unsafe { number_of(device) }).unwrap_or(-1)
}

/// Returns the number of a device on its machine.
///
/// # Safety
/// `device` is one of the list.
unsafe fn number_of(device: *mut Device) -> wire::Device {
    // SAFETY: every device is the first field of a place, which is never freed.
    unsafe { (*device.cast::<Place>()).number }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_guid(device: *mut Device) -> u64 {
    // SAFETY: ibv_get_device_guid(3): a device of the list.
    attached(unsafe { number_of(device) }).map_or(0, guid)
}

/// Returns the device's GUID in big-endian order, as the headers define it.
fn guid(device: &Attached) -> u64 {
    u64::from_ne_bytes(wire::guid(&device.addresses))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut Device) -> *mut ibv_context {
    // SAFETY: ibv_open_device(3): a device of the list.
    pointer(context_of(unsafe { number_of(device) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(_context: *mut ibv_context) -> c_int {
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    // SAFETY: rdma_get_devices(3): null, or a place for the count.
    pointer(each_device(context_of).and_then(|contexts| unsafe { listed(contexts, count) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    // SAFETY: rdma_free_devices(3): a list from `rdma_get_devices`, allocated by malloc.
    unsafe { libc::free(list.cast()) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_device(
    context: *mut ibv_context,
    attributes: *mut ibv_device_attr,
) -> c_int {
    // SAFETY: ibv_query_device(3): a device's context.
    returned(unsafe { attached_in(context) }.and_then(describe).map(|answer| {
        // SAFETY: ibv_query_device(3): a place for the answer.
        unsafe { attributes.write(answer) };
    }))
}

/// `ibv_query_device_ex(3)`, with none of the extended capabilities.
unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    _input: *const c_void,
    attributes: *mut DeviceEx,
    size: usize,
) -> c_int {
    // SAFETY: ibv_query_device_ex(3): a device's context.
    let described = match unsafe { attached_in(context) }.and_then(describe) {
        Ok(described) => described,
        Err(errno) => return errno,
    };
    if size < size_of::<ibv_device_attr>() {
        return libc::EINVAL;
    }
    let mut answer: DeviceEx = zeroed();
    answer.orig_attr = described;
    answer.phys_port_cnt_ex = PORT.into();
    // SAFETY: ibv_query_device_ex(3): a place for `size` bytes; later versions of the structure
    // have more than this one.
    unsafe {
        attributes.cast::<u8>().write_bytes(0, size);
        let known = size.min(size_of::<DeviceEx>());
        (&raw const answer).cast::<u8>().copy_to_nonoverlapping(attributes.cast(), known);
    }
    0
}

fn describe(device: &Attached) -> Result<ibv_device_attr, c_int> {
    let most = |value: u32| c_int::try_from(value).unwrap_or(c_int::MAX);
    let limits = &link()?.limits;
    let mut answer: ibv_device_attr = zeroed();
    fill(&mut answer.fw_ver, "1.0");
    answer.node_guid = guid(device);
    answer.sys_image_guid = answer.node_guid;
    answer.max_mr_size = limits.max_mr_size;
    answer.page_size_cap = 4096;
    answer.max_qp = most(limits.max_qp);
    answer.max_qp_wr = most(limits.max_qp_wr);
    answer.max_sge = MAX_SGE;
    answer.max_sge_rd = MAX_SGE;
    answer.max_cq = most(limits.max_cq);
    answer.max_cqe = most(limits.max_cqe);
    answer.max_mr = most(limits.max_mr);
    answer.max_pd = most(limits.max_qp);
    answer.max_qp_rd_atom = limits.max_qp_rd_atom.into();
    answer.max_res_rd_atom = most(limits.max_qp);
    answer.max_qp_init_rd_atom = limits.max_qp_rd_atom.into();
    answer.atomic_cap = IBV_ATOMIC_HCA;
    answer.max_pkeys = 1;
    answer.phys_port_cnt = PORT;
    // They cost the device nothing.
    answer.max_ah = c_int::MAX;
    answer.max_srq = most(limits.max_qp);
    answer.max_srq_wr = most(limits.max_qp_wr);
    answer.max_srq_sge = MAX_SGE;
    // A locally administered id (IEEE 802), which no vendor has; other software devices use it too.
    answer.vendor_id = 0x00ff_ffff;
    answer.vendor_part_id = 1;
    Ok(answer)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attributes: *mut _compat_ibv_port_attr,
) -> c_int {
    // SAFETY: ibv_query_port(3): a device's context.
    let device = match unsafe { attached_in(context) } {
        Ok(device) if port == PORT => device,
        Ok(_) => return libc::EINVAL,
        Err(errno) => return errno,
    };
    let mut answer: PortAttributes = zeroed();
    answer.state = PORT_ACTIVE;
    answer.max_mtu = MTU_4096;
    answer.active_mtu = MTU_4096;
    answer.gid_tbl_len = c_int::try_from(device.addresses.len()).unwrap_or(c_int::MAX);
    answer.max_msg_sz = 1 << 31;
    answer.pkey_tbl_len = 1;
    answer.max_vl_num = 1;
    answer.active_width = WIDTH_4X;
    answer.active_speed = SPEED_EDR;
    answer.phys_state = LINK_UP;
    answer.link_layer = LINK_LAYER_ETHERNET;
    // SAFETY: ibv_query_port(3), of IBVERBS_1.1: the caller's structure has at least this many
    // bytes in every version.
    unsafe {
        (&raw const answer).cast::<u8>().copy_to_nonoverlapping(attributes.cast(), PORT_ATTRIBUTES);
    }
    0
}

/// Returns the address that a GID stands for.
pub(crate) fn address_of(gid: [u8; 16]) -> IpAddr {
    IpAddr::from(gid).to_canonical()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    into: *mut ibv_gid,
) -> c_int {
    // SAFETY: ibv_query_gid(3): a device's context.
    let addresses = unsafe { attached_in(context) }.map_or(&[][..], |device| &device.addresses);
    let found = usize::try_from(index).ok().and_then(|index| addresses.get(index));
    let Some(&address) = found.filter(|_| port == PORT) else {
        set_errno(libc::EINVAL);
        return -1;
    };
    // SAFETY: ibv_query_gid(3): a place for the answer.
    unsafe { into.write(ibv_gid { raw: gid(address) }) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid_type(
    context: *mut ibv_context,
    port: u8,
    index: c_uint,
    kind: *mut c_uint,
) -> c_int {
    // SAFETY: a device's context.
    let known = unsafe { attached_in(context) }.is_ok_and(|device| (index as usize) < device.addresses.len());
    if known && port == PORT {
        // SAFETY: the caller gives a place for the type. This function's number for RoCEv2 is 1.
        unsafe { kind.write(1) };
    }
    concluded(if known && port == PORT { Ok(()) } else { Err(libc::EINVAL) })
}

fn entry(device: &Attached, index: usize) -> Option<GidEntry> {
    let bytes = gid(*device.addresses.get(index)?);
    let [a, b, c, d, e, f, g, h, rest @ ..] = bytes;
    let gid = [u64::from_ne_bytes([a, b, c, d, e, f, g, h]), u64::from_ne_bytes(rest)];
    let (gid_index, port_num) = (index as u32, PORT.into());
    Some(GidEntry { gid, gid_index, port_num, gid_type: ROCE_V2, ndev_ifindex: 0 })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    into: *mut GidEntry,
    flags: u32,
    size: usize,
) -> c_int {
    // SAFETY: ibv_query_gid_ex(3): a device's context.
    let found = unsafe { attached_in(context) }.ok().and_then(|device| entry(device, index as usize));
    match found {
        Some(entry) if port == PORT.into() && flags == 0 && size >= size_of::<GidEntry>() => {
            // SAFETY: ibv_query_gid_ex(3): a place for `size` bytes.
            unsafe { into.write(entry) };
            0
        }
        Some(_) => libc::EINVAL,
        None => libc::ENODATA,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    into: *mut GidEntry,
    most: usize,
    flags: u32,
    size: usize,
) -> isize {
    // SAFETY: ibv_query_gid_table(3): a device's context.
    let Ok(device) = (unsafe { attached_in(context) }) else { return -(libc::ENODEV as isize) };
    if flags != 0 || size != size_of::<GidEntry>() || most < device.addresses.len() {
        return -(libc::EINVAL as isize);
    }
    let mut count = 0;
    for found in (0..most).map_while(|index| entry(device, index)) {
        // SAFETY: ibv_query_gid_table(3): places for `most` entries of `size` bytes.
        unsafe { into.add(count).write(found) };
        count += 1;
    }
    isize::try_from(count).unwrap_or(isize::MAX)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_pkey(
    _context: *mut ibv_context,
    port: u8,
    index: c_int,
    key: *mut u16,
) -> c_int {
    if port != PORT || index != 0 {
        set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: ibv_query_pkey(3): a place for the answer.
    unsafe { key.write(u16::MAX) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_pkey_index(_context: *mut ibv_context, port: u8, key: u16) -> c_int {
    if port == PORT && key == u16::MAX { 0 } else { -1 }
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_fork_init() -> c_int {
    // Nothing has to be prepared: the fabric reaches memory by the parent's addresses, whatever a
    // child does.
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_is_fork_initialized() -> c_int {
    // IBV_FORK_UNNEEDED.
    2
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_read_sysfs_file(
    _directory: *const c_char,
    _file: *const c_char,
    _into: *mut c_char,
    _size: usize,
) -> c_int {
    // There is no device in sysfs.
    set_errno(libc::ENOENT);
    -1
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}
