//! The extended way to post (`ibv_wr_post(3)`): functions of the queue pair build work requests,
//! between `ibv_wr_start` and `ibv_wr_complete`.
//!
//! Until then the requests belong to the thread, so threads that post to one queue pair do not wait
//! for each other.

use core::cell::RefCell;
use core::ffi::{c_int, c_void};
use std::net::{IpAddr, Ipv4Addr};

use softrdma_wire::{Destination, Local, MAX_INLINE, Op, Post, Reply, Send, Sge};

use crate::chain::are_certain;
use crate::handles::destination;
use crate::layout::{
    AddressHandle, Buffer, IBV_QPT_UD, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, PairEx, ibv_qp, ibv_sge, zeroed,
};
use crate::link::post;
use crate::pair::Pair;

/// `IBV_QP_EX_WITH_RDMA_WRITE`, `…_RDMA_WRITE_WITH_IMM`, `…_SEND`, `…_SEND_WITH_IMM`,
/// `…_RDMA_READ`, `…_ATOMIC_CMP_AND_SWP` and `…_ATOMIC_FETCH_AND_ADD`.
pub(crate) const OPERATIONS: u64 = 0x7f;
/// Those of queue pairs for datagrams.
pub(crate) const SENDS: u64 = 0xc;

struct Building {
    pair: *mut PairEx,
    work: Vec<Send<'static>>,
    /// Why the requests cannot be posted.
    wrong: Option<c_int>,
}

/// The destination of a datagram that was given none, which the fabric refuses.
const NOWHERE: Destination = {
    let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    Destination { local: nowhere, remote: nowhere, number: 0, key: 0 }
};

thread_local! {
    static BUILDING: RefCell<Vec<Building>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn functions(qp_base: ibv_qp) -> PairEx {
    PairEx {
        qp_base,
        wr_atomic_cmp_swp: Some(compare_swap),
        wr_atomic_fetch_add: Some(fetch_add),
        wr_rdma_read: Some(rdma_read),
        wr_rdma_write: Some(rdma_write),
        wr_rdma_write_imm: Some(rdma_write_imm),
        wr_send: Some(send),
        wr_send_imm: Some(send_imm),
        wr_set_inline_data: Some(set_inline_data),
        wr_set_inline_data_list: Some(set_inline_data_list),
        wr_set_ud_addr: Some(set_ud_addr),
        wr_set_sge: Some(set_sge),
        wr_set_sge_list: Some(set_sge_list),
        wr_start: Some(start),
        wr_complete: Some(complete),
        wr_abort: Some(abort),
        ..zeroed()
    }
}

fn take(pair: *mut PairEx) -> Option<Building> {
    BUILDING.with_borrow_mut(|all| {
        let place = all.iter().position(|building| building.pair == pair)?;
        Some(all.swap_remove(place))
    })
}

/// Changes the requests that are being built for this queue pair. Does nothing outside
/// `ibv_wr_start` and `ibv_wr_complete`.
fn with(pair: *mut PairEx, act: impl FnOnce(&mut Building)) {
    BUILDING.with_borrow_mut(|all| {
        if let Some(building) = all.iter_mut().find(|building| building.pair == pair) {
            act(building);
        }
    });
}

unsafe extern "C" fn start(pair: *mut PairEx) {
    take(pair);
    let building = Building { pair, work: Vec::new(), wrong: None };
    BUILDING.with_borrow_mut(|all| all.push(building));
}

unsafe extern "C" fn abort(pair: *mut PairEx) {
    take(pair);
}

unsafe extern "C" fn complete(pair: *mut PairEx) -> c_int {
    let Some(Building { work, wrong, .. }) = take(pair) else { return libc::EINVAL };
    if let Some(errno) = wrong {
        return errno;
    }
    if work.is_empty() {
        return 0;
    }
    // SAFETY: ibv_wr_post(3): a live queue pair, made as a `Pair`; these fields do not change.
    let (pair, cap, room) = unsafe {
        let made = pair.cast::<Pair>();
        ((*pair).qp_base.handle, (*made).cap, &(*made).send_room)
    };
    let Ok(all) = u32::try_from(work.len()) else { return libc::ENOMEM };
    let certain = are_certain(&work, cap.max_inline_data);
    // All of them are posted, or none.
    match post(pair, room, certain, all, work, |work| Post::Send { pair, work }) {
        Ok(Reply::Posted { errno, .. }) | Err(errno) => errno,
        Ok(_) => libc::EPROTO,
    }
}

/// Begins a request.
///
/// # Safety
/// `pair` is alive.
unsafe fn begin(pair: *mut PairEx, op: Op) {
    // SAFETY: the caller vouches for `pair`, which was made as a `Pair` that begins with it.
    let (id, flags, all) = unsafe { ((*pair).wr_id, (*pair).wr_flags, (*pair.cast::<Pair>()).all_signaled) };
    let (signaled, solicited) = (all || flags & IBV_SEND_SIGNALED != 0, flags & IBV_SEND_SOLICITED != 0);
    // SAFETY: as above.
    let op = match (unsafe { (*pair).qp_base.qp_type } == IBV_QPT_UD, op) {
        (true, Op::Send) => Op::Datagram { to: NOWHERE, immediate: None },
        (true, Op::SendImmediate(immediate)) => Op::Datagram { to: NOWHERE, immediate: Some(immediate) },
        (_, op) => op,
    };
    let local = Local::Memory(Vec::new());
    with(pair, |building| building.work.push(Send { id, op, signaled, solicited, local }));
}

unsafe extern "C" fn send(pair: *mut PairEx) {
    // SAFETY: ibv_wr_post(3): a live queue pair, here and below.
    unsafe { begin(pair, Op::Send) };
}

unsafe extern "C" fn send_imm(pair: *mut PairEx, immediate: u32) {
    // SAFETY: as above.
    unsafe { begin(pair, Op::SendImmediate(u32::from_be(immediate))) };
}

unsafe extern "C" fn rdma_write(pair: *mut PairEx, rkey: u32, address: u64) {
    // SAFETY: as above.
    unsafe { begin(pair, Op::Write { address, rkey }) };
}

unsafe extern "C" fn rdma_write_imm(pair: *mut PairEx, rkey: u32, address: u64, immediate: u32) {
    let immediate = u32::from_be(immediate);
    // SAFETY: as above.
    unsafe { begin(pair, Op::WriteImmediate { address, rkey, immediate }) };
}

unsafe extern "C" fn rdma_read(pair: *mut PairEx, rkey: u32, address: u64) {
    // SAFETY: as above.
    unsafe { begin(pair, Op::Read { address, rkey }) };
}

unsafe extern "C" fn fetch_add(pair: *mut PairEx, rkey: u32, address: u64, add: u64) {
    // SAFETY: as above.
    unsafe { begin(pair, Op::FetchAdd { address, rkey, add }) };
}

unsafe extern "C" fn compare_swap(pair: *mut PairEx, rkey: u32, address: u64, compare: u64, swap: u64) {
    // SAFETY: as above.
    unsafe { begin(pair, Op::CompareSwap { address, rkey, compare, swap }) };
}

unsafe extern "C" fn set_ud_addr(pair: *mut PairEx, ah: *mut AddressHandle, number: u32, key: u32) {
    // SAFETY: ibv_wr_post(3): a live queue pair, and a live handle.
    let found = unsafe { destination(ah, (*pair).qp_base.pd, number, key) };
    with(pair, |building| match (building.work.last_mut().map(|work| &mut work.op), found) {
        (Some(Op::Datagram { to, .. }), Ok(found)) => *to = found,
        _ => building.wrong = Some(libc::EINVAL),
    });
}

/// Sets the bytes of the request that was begun last.
fn set(pair: *mut PairEx, local: Result<Local<'static>, c_int>) {
    with(pair, |building| match (building.work.last_mut(), local) {
        (Some(work), Ok(local)) => work.local = local,
        (None, _) => building.wrong = Some(libc::EINVAL),
        (_, Err(errno)) => building.wrong = Some(errno),
    });
}

/// Sets the elements of the request that was begun last, at most as many as the queue pair was made
/// for.
///
/// # Safety
/// `pair` is alive.
unsafe fn set_elements(pair: *mut PairEx, list: &[ibv_sge]) {
    // SAFETY: the caller vouches for `pair`, which was made as a `Pair`.
    let most = unsafe { (*pair.cast::<Pair>()).cap.max_send_sge };
    let on_wire = |&ibv_sge { addr: address, length: len, lkey }: &ibv_sge| Sge { address, len, lkey };
    let fits = list.len() <= most as usize;
    set(pair, if fits { Ok(Local::Memory(list.iter().map(on_wire).collect())) } else { Err(libc::EINVAL) });
}

unsafe extern "C" fn set_sge(pair: *mut PairEx, lkey: u32, addr: u64, length: u32) {
    // SAFETY: ibv_wr_post(3): a live queue pair.
    unsafe { set_elements(pair, &[ibv_sge { addr, length, lkey }]) };
}

unsafe extern "C" fn set_sge_list(pair: *mut PairEx, count: usize, list: *const ibv_sge) {
    // SAFETY: ibv_wr_post(3): a live queue pair, and `count` elements, which are read during the
    // call.
    unsafe { set_elements(pair, if count == 0 { &[] } else { core::slice::from_raw_parts(list, count) }) };
}

/// Copies the bytes of buffers, one after the other.
///
/// # Safety
/// The buffers name bytes of this process that do not change during the call.
unsafe fn copied(buffers: &[Buffer], most: u32) -> Result<Local<'static>, c_int> {
    let total = buffers.iter().try_fold(0_usize, |sum, buffer| sum.checked_add(buffer.length));
    if total.is_none_or(|total| total > MAX_INLINE || total > most as usize) {
        return Err(libc::EINVAL);
    }
    let mut bytes = Vec::new();
    for buffer in buffers.iter().filter(|buffer| buffer.length > 0) {
        // SAFETY: the caller vouches for the bytes.
        bytes.extend_from_slice(unsafe {
            core::slice::from_raw_parts(buffer.addr.cast::<u8>(), buffer.length)
        });
    }
    Ok(Local::Inline(bytes.into()))
}

unsafe extern "C" fn set_inline_data_list(pair: *mut PairEx, count: usize, buffers: *const Buffer) {
    // SAFETY: ibv_wr_post(3): a live queue pair, made as a `Pair`, and `count` buffers, which are
    // read during the call.
    let local = unsafe {
        let buffers = if count == 0 { &[] } else { core::slice::from_raw_parts(buffers, count) };
        copied(buffers, (*pair.cast::<Pair>()).cap.max_inline_data)
    };
    set(pair, local);
}

unsafe extern "C" fn set_inline_data(pair: *mut PairEx, addr: *mut c_void, length: usize) {
    // SAFETY: as above: one buffer.
    unsafe { set_inline_data_list(pair, 1, &Buffer { addr, length }) };
}
