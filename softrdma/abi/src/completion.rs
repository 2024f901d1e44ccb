//! Completion channels and completion queues.

use core::ffi::{c_int, c_uint, c_void};
use std::os::fd::{FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::{Mutex, PoisonError};

use softrdma_wire::{Completion, Name, RECORD, Request, Source};

use crate::acknowledged::Unacknowledged;
use crate::device::number_in;
use crate::layout::{
    IBV_WC_GRH, IBV_WC_WITH_IMM, QueueEx, ibv_comp_channel, ibv_context, ibv_cq, ibv_wc,
    ibv_wc__bindgen_ty_1, zeroed,
};
use crate::link::{ask, concluded, link, make_channel, make_queue, pointer, returned, share};
use crate::names;
use crate::polling::{Turn, functions};
use crate::ring::Ring;

/// A completion channel, with its name in the fabric.
#[repr(C)]
pub(crate) struct Channel {
    channel: ibv_comp_channel,
    name: Name,
}

pub(crate) fn create_channel(context: *mut ibv_context) -> Result<*mut ibv_comp_channel, c_int> {
    let (name, descriptor) =
        make_channel(&Request::CreateCompletionChannel, Request::DestroyCompletionChannel)?;
    let mut channel: ibv_comp_channel = zeroed();
    channel.context = context;
    channel.fd = descriptor.into_raw_fd();
    Ok(Box::into_raw(Box::new(Channel { channel, name })).cast())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    pointer(create_channel(context))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let channel: *mut Channel = channel.cast();
    // SAFETY: ibv_destroy_comp_channel(3): a channel from `ibv_create_comp_channel`, in a box of a
    // `Channel`.
    let (name, descriptor) = unsafe { ((*channel).name, (*channel).channel.fd) };
    let freed = ask(&Request::DestroyCompletionChannel(name));
    if freed.is_ok() {
        // SAFETY: as above; the caller gives it up, and with it the descriptor that it was made
        // with.
        drop(unsafe { OwnedFd::from_raw_fd(descriptor) });
        // SAFETY: as above.
        drop(unsafe { Box::from_raw(channel) });
    }
    returned(freed)
}

/// A completion queue, and its ring of completions.
///
/// The program reads fields of `ex`, and this library writes them, while other threads are in this
/// library. So no reference is made to the whole: the other fields are borrowed one by one.
#[repr(C)]
pub(crate) struct Queue {
    ex: QueueEx,
    ring: Mutex<Ring>,
    pub(crate) turn: Turn,
    events: Unacknowledged,
    pub(crate) asynchronous: Unacknowledged,
}

/// Makes a completion queue of `depth` entries.
///
/// # Safety
/// `context` is a device's, and `channel` null or alive.
pub(crate) unsafe fn create_queue(
    context: *mut ibv_context,
    depth: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> Result<*mut ibv_cq, c_int> {
    let vectors = link()?.limits.vectors;
    let depth = u32::try_from(depth).map_err(|_| libc::EINVAL)?;
    let vector = u32::try_from(vector).ok().filter(|vector| *vector < vectors).ok_or(libc::EINVAL)?;
    let channel_name = match channel.is_null() {
        true => None,
        // SAFETY: ibv_create_cq(3): null, or a `Channel` from `ibv_create_comp_channel`.
        false => Some(unsafe { (*channel.cast::<Channel>()).name }),
    };
    // SAFETY: the caller vouches for `context`.
    let device = unsafe { number_in(context) };
    let (handle, page, memory) =
        make_queue(&Request::CreateQueue { device, depth, channel: channel_name, vector })?;
    let mapped = share(&memory).and_then(|()| Ring::map(handle, page, &memory));
    let ring = mapped.inspect_err(|_| {
        // If the fabric is gone, so is its queue.
        let _gone = ask(&Request::DestroyQueue(handle));
    })?;
    let mut cq: ibv_cq = zeroed();
    cq.context = context;
    cq.channel = channel;
    cq.cq_context = cq_context;
    cq.handle = handle;
    cq.cqe = c_int::try_from(depth).unwrap_or(c_int::MAX);
    let queue = Queue {
        ex: functions(cq),
        ring: Mutex::new(ring),
        turn: Turn::default(),
        events: Unacknowledged::default(),
        asynchronous: Unacknowledged::default(),
    };
    let queue = Box::into_raw(Box::new(queue));
    names::enter(handle, queue);
    Ok(queue.cast())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    depth: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: ibv_create_cq(3): a device's context, and null or a live channel.
    pointer(unsafe { create_queue(context, depth, cq_context, channel, vector) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: ibv_destroy_cq(3): a queue from `ibv_create_cq`, in a box of a `Queue`.
    let handle = unsafe { (*cq).handle };
    let freed = ask(&Request::DestroyQueue(handle));
    if freed.is_ok() {
        names::leave(handle);
        let queue: *mut Queue = cq.cast();
        // SAFETY: as above; alive until it is freed below.
        unsafe {
            (*queue).events.wait();
            (*queue).asynchronous.wait();
        }
        // SAFETY: as above; the fabric says that no queue pair reports to it, and the caller gives
        // it up.
        drop(unsafe { Box::from_raw(queue) });
    }
    returned(freed)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: ibv_get_cq_event(3): a live completion channel.
    let descriptor = unsafe { (*channel).fd };
    loop {
        let mut record = [0; RECORD];
        // SAFETY: read(2): a descriptor that the channel owns, and a buffer of RECORD bytes. The
        // program may have set the descriptor's flags, so it decides whether this blocks.
        let read = unsafe { libc::read(descriptor, record.as_mut_ptr().cast(), RECORD) };
        match read {
            // read(2) has set `errno`.
            -1 => return -1,
            // Records are written whole.
            8 => {}
            // The fabric is gone.
            _ => return concluded(Err(libc::EIO)),
        }
        let name = Name::try_from(u64::from_le_bytes(record)).ok();
        let found = name.and_then(|name| {
            // SAFETY: ibv_get_cq_event(3): alive under the table's lock, and from here on until the
            // event is acknowledged.
            names::find_with(name, |queue: *mut Queue| unsafe { &(*queue).events }.read())
        });
        // The queue was destroyed, so its event is skipped.
        let Some(found) = found else { continue };
        // SAFETY: ibv_get_cq_event(3): places for the answers. `found` is alive, as its event is
        // not acknowledged.
        unsafe {
            cq.write(found.cast());
            cq_context.write((*found).ex.cq.cq_context);
        }
        return 0;
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    // SAFETY: ibv_ack_cq_events(3): a completion queue, which is alive because its destruction
    // waits for this.
    unsafe { &(*cq.cast::<Queue>()).events }.acknowledge(count);
}

pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: ibv_req_notify_cq(3): a live completion queue.
    let ring = unsafe { ring(cq) };
    returned(ring.lock().unwrap_or_else(PoisonError::into_inner).arm(solicited_only != 0))
}

/// Returns the ring of a queue.
///
/// # Safety
/// `cq` is alive during `'a`.
pub(crate) unsafe fn ring<'a>(cq: *mut ibv_cq) -> &'a Mutex<Ring> {
    // SAFETY: the caller vouches for `cq`, which `create_queue` made as a `Queue`; only this
    // library writes to the field.
    unsafe { &(*cq.cast::<Queue>()).ring }
}

/// Takes the next completion, if there is one.
///
/// # Safety
/// `cq` is alive.
pub(crate) unsafe fn next_completion(cq: *mut ibv_cq) -> Result<Option<Completion>, c_int> {
    // SAFETY: the caller vouches for `cq`.
    let mut ring = unsafe { ring(cq) }.lock().unwrap_or_else(PoisonError::into_inner);
    let mut next = None;
    ring.poll(1, |completion| next = Some(completion))?;
    Ok(next)
}

pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, most: c_int, into: *mut ibv_wc) -> c_int {
    let Ok(most) = usize::try_from(most) else { return -libc::EINVAL };
    // SAFETY: ibv_poll_cq(3): a live completion queue. The lock is held while the fabric is asked,
    // so that completions keep their order.
    let mut ring = unsafe { ring(cq) }.lock().unwrap_or_else(PoisonError::into_inner);
    let mut count = 0;
    let given = ring.poll(most, |completion| {
        // SAFETY: ibv_poll_cq(3): an array of at least `most` entries; `count` is less than that.
        unsafe { into.add(count).write(work_completion(&completion)) };
        count += 1;
    });
    given.map_or(-1, |count| c_int::try_from(count).unwrap_or(c_int::MAX))
}

/// Returns `wc_flags` of `struct ibv_wc`.
pub(crate) const fn flags(completion: &Completion) -> c_uint {
    (if completion.immediate.is_some() { IBV_WC_WITH_IMM } else { 0 })
        | (if completion.source.is_some() { IBV_WC_GRH } else { 0 })
}

/// Returns `sl` of `struct ibv_wc`, which RoCE does not have: the type of the network header, as
/// mlx5 does (0 is RoCE version 1). UCX looks for it there.
pub(crate) const fn level(completion: &Completion) -> u8 {
    match completion.source {
        Some(Source { ip4: true, .. }) => 2,
        Some(_) => 1,
        None => 0,
    }
}

fn work_completion(completion: &Completion) -> ibv_wc {
    let &Completion { id, pair, status, vendor, opcode, len, immediate, source } = completion;
    ibv_wc {
        wr_id: id,
        status,
        opcode,
        vendor_err: vendor,
        byte_len: len,
        __bindgen_anon_1: ibv_wc__bindgen_ty_1 { imm_data: immediate.unwrap_or(0).to_be() },
        qp_num: pair,
        src_qp: source.map_or(0, |source| source.number),
        sl: level(completion),
        wc_flags: flags(completion),
        ..zeroed()
    }
}
