//! Queue pairs.

use core::ffi::{c_int, c_uint};
use core::ptr;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use softrdma_wire::{MAX_INLINE, Name, Params, Reply, Request, Service, Transition};

use crate::acknowledged::Unacknowledged;
use crate::completion::ring;
use crate::device::{MAX_SGE, PORT, gid};
use crate::handles;
use crate::layout::{
    IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_QP_ACCESS_FLAGS,
    IBV_QP_AV, IBV_QP_DEST_QPN, IBV_QP_EN_SQD_ASYNC_NOTIFY, IBV_QP_MAX_DEST_RD_ATOMIC,
    IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT,
    IBV_QP_QKEY, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE,
    IBV_QP_TIMEOUT, IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RESET, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD,
    IBV_QPT_RC, IBV_QPT_UD, PairAttributes, PairEx, ibv_ah_attr, ibv_context, ibv_gid, ibv_pd, ibv_qp,
    ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr, zeroed,
};
use crate::link::{Attached, ask, call, link, pointer, returned};
use crate::names;
use crate::posting::{OPERATIONS, SENDS, functions};
use crate::region::on_wire;
use crate::ring::{Ring, Side};
use crate::room::Room;
use crate::shared;

/// A queue pair, and the parameters that it was made with.
///
/// The program writes to `ex`, by the headers' inline functions, while other threads call this
/// library. So no reference is made to the whole: this library reads or borrows its fields one by
/// one.
#[repr(C)]
pub(crate) struct Pair {
    ex: PairEx,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) all_signaled: bool,
    /// Whether it was made for `ibv_wr_post(3)`.
    extended: bool,
    /// The attributes that the program or the connection manager has set (`ibv_query_qp(3)`).
    set: Mutex<Set>,
    /// Whether it is in RESET, and so has no receives.
    is_reset: AtomicBool,
    /// Whether it is in INIT, where posted receives are kept.
    pub(crate) keeps: AtomicBool,
    /// How many receives of its own certainly find room, if it has no shared queue.
    pub(crate) room: Arc<Room>,
    /// How many sends certainly find room. An answer says it; then each send whose completion the
    /// program takes gives its place back. Those without a completion give none until the next
    /// answer.
    pub(crate) send_room: Arc<Room>,
    pub(crate) events: Unacknowledged,
}

/// Attributes that were set, and that only this library remembers.
#[derive(Clone, Copy, Default)]
struct Set {
    access: c_uint,
    mtu: c_uint,
    send_psn: u32,
    receive_psn: u32,
    read_depth: u8,
    answered_reads: u8,
    rnr_timer: u8,
    timeout: u8,
    retry: u8,
    rnr_retry: u8,
    key: u32,
}

impl Set {
    /// Copies the attributes that the mask names.
    fn merge(&mut self, from: &ibv_qp_attr, mask: u32) {
        let mut take = |flag: u32, set: &mut dyn FnMut(&mut Self)| {
            if mask & flag != 0 {
                set(self);
            }
        };
        take(IBV_QP_ACCESS_FLAGS, &mut |set| set.access = from.qp_access_flags);
        take(IBV_QP_PATH_MTU, &mut |set| set.mtu = from.path_mtu);
        take(IBV_QP_SQ_PSN, &mut |set| set.send_psn = from.sq_psn);
        take(IBV_QP_RQ_PSN, &mut |set| set.receive_psn = from.rq_psn);
        take(IBV_QP_MAX_QP_RD_ATOMIC, &mut |set| set.read_depth = from.max_rd_atomic);
        take(IBV_QP_MAX_DEST_RD_ATOMIC, &mut |set| set.answered_reads = from.max_dest_rd_atomic);
        take(IBV_QP_MIN_RNR_TIMER, &mut |set| set.rnr_timer = from.min_rnr_timer);
        take(IBV_QP_TIMEOUT, &mut |set| set.timeout = from.timeout);
        take(IBV_QP_RETRY_CNT, &mut |set| set.retry = from.retry_cnt);
        take(IBV_QP_RNR_RETRY, &mut |set| set.rnr_retry = from.rnr_retry);
        take(IBV_QP_QKEY, &mut |set| set.key = from.qkey);
    }
}

/// The highest timeout: the field has five bits.
pub(crate) const MOST_TIMEOUT: u8 = 31;

/// Sets the timeout that the connection manager gives a queue pair: `RDMA_OPTION_ID_ACK_TIMEOUT` of
/// `rdma_set_option(3)`.
///
/// # Safety
/// `qp` is alive.
pub(crate) unsafe fn set_timeout(qp: *mut ibv_qp, timeout: u8) -> Result<(), c_int> {
    // SAFETY: the caller vouches for `qp`.
    let (pair, set) = unsafe { (name(qp), attributes_of(qp)) };
    ask(&Request::SetTimeout { pair, timeout })?;
    set.lock().unwrap_or_else(PoisonError::into_inner).timeout = timeout;
    Ok(())
}

/// `ibv_create_qp(3)`.
///
/// # Safety
/// `pd` and the objects that the attributes name are alive.
pub(crate) unsafe fn create(
    pd: *mut ibv_pd,
    attributes: &mut ibv_qp_init_attr,
) -> Result<*mut ibv_qp, c_int> {
    let &mut ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, ref mut cap, qp_type, sq_sig_all } =
        attributes;
    let service = match qp_type {
        IBV_QPT_RC => Service::Connected,
        IBV_QPT_UD => Service::Datagram,
        _ => return Err(libc::EOPNOTSUPP),
    };
    let most = MAX_SGE.cast_unsigned();
    if send_cq.is_null() || recv_cq.is_null() || cap.max_send_sge > most || cap.max_recv_sge > most {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller vouches for the domain and the queues.
    let (context, domain, send_queue, receive_queue) =
        unsafe { ((*pd).context, (*pd).handle, (*send_cq).handle, (*recv_cq).handle) };
    // As a device whose queue pairs always have at least one element.
    let elements = [cap.max_send_sge.max(1), cap.max_recv_sge.max(1)];
    let request = Request::CreatePair {
        domain,
        send_queue,
        receive_queue,
        // SAFETY: as above: null, or a live queue.
        shared: unsafe { shared::name(srq) },
        service,
        send_depth: cap.max_send_wr,
        receive_depth: cap.max_recv_wr,
        elements: elements.map(|most| most as u8),
        inline: cap.max_inline_data,
    };
    if cap.max_inline_data > MAX_INLINE as u32 {
        return Err(libc::EINVAL);
    }
    let Reply::Pair { name, number, inline } = call(&request)? else { return Err(libc::EPROTO) };
    cap.max_inline_data = inline;
    [cap.max_send_sge, cap.max_recv_sge] = elements;
    let qp = ibv_qp {
        context,
        qp_context,
        pd,
        send_cq,
        recv_cq,
        srq,
        handle: name,
        qp_num: number,
        state: IBV_QPS_RESET,
        qp_type,
        ..zeroed()
    };
    let (ex, events) = (functions(qp), Unacknowledged::default());
    let pair = Pair {
        ex,
        cap: *cap,
        all_signaled: sq_sig_all != 0,
        extended: false,
        set: Mutex::default(),
        is_reset: AtomicBool::new(true),
        keeps: AtomicBool::new(false),
        room: Arc::default(),
        send_room: Arc::default(),
        events,
    };
    let pair = Box::into_raw(Box::new(pair));
    names::enter(name, pair);
    Ok(pair.cast())
}

/// Returns the attributes that were set.
///
/// # Safety
/// `qp` is alive during `'a`.
unsafe fn attributes_of<'a>(qp: *mut ibv_qp) -> &'a Mutex<Set> {
    // SAFETY: the caller vouches for `qp`, which `create` made as a `Pair`; only this library
    // writes to the field.
    unsafe { &(*qp.cast::<Pair>()).set }
}

/// Returns the queue pair's name in the fabric.
///
/// # Safety
/// `qp` is alive.
pub(crate) unsafe fn name(qp: *mut ibv_qp) -> Name {
    // SAFETY: the caller vouches for `qp`.
    unsafe { (*qp).handle }
}

/// Moves a queue pair to INIT, as the connection manager does with those that it makes.
///
/// # Safety
/// `qp` is alive.
pub(crate) unsafe fn initialise(qp: *mut ibv_qp) -> Result<(), c_int> {
    // SAFETY: the caller vouches for `qp`.
    ask(&Request::Modify { pair: unsafe { name(qp) }, to: Transition::Initialise })?;
    // SAFETY: as above.
    unsafe {
        (*qp).state = IBV_QPS_INIT;
        is_initialised(qp);
    }
    Ok(())
}

/// Records that a queue pair is in INIT, where no message takes a receive before [`leaves_init`].
///
/// If it was in RESET before, it has room for as many receives as it was made for. Receives are
/// kept if it has no shared queue.
///
/// # Safety
/// `qp` is alive.
unsafe fn is_initialised(qp: *mut ibv_qp) {
    // SAFETY: the caller vouches for `qp`, which `create` made as a `Pair`.
    let (pair, depth, number) = unsafe {
        let pair = qp.cast::<Pair>();
        let fields = (&(*pair).is_reset, &(*pair).keeps, &(*pair).room, &(*pair).send_room);
        (fields, (*pair).cap.max_recv_wr, (*qp).qp_num)
    };
    let (is_reset, keeps, room, send_room) = pair;
    if !is_reset.swap(false, Relaxed) {
        return;
    }
    // SAFETY: as above.
    unsafe { with_ring(qp, Side::Send, |ring| ring.follow(number, Side::Send, send_room)) };
    // SAFETY: as above.
    if unsafe { (*qp).srq.is_null() } {
        // SAFETY: as above.
        unsafe { with_ring(qp, Side::Receive, |ring| ring.follow(number, Side::Receive, room)) };
        room.count_anew(depth);
        keeps.store(true, Relaxed);
    }
}

/// Passes the completion queue of one side of a queue pair.
///
/// # Safety
/// `qp` is alive.
unsafe fn with_ring(qp: *mut ibv_qp, side: Side, act: impl FnOnce(&mut Ring)) {
    // SAFETY: the caller vouches for `qp`, whose completion queues outlive it.
    let ring = unsafe { ring(if side == Side::Send { (*qp).send_cq } else { (*qp).recv_cq }) };
    act(&mut ring.lock().unwrap_or_else(PoisonError::into_inner));
}

/// Completions of a queue pair give no place back from now on.
///
/// # Safety
/// `qp` is alive.
unsafe fn forget(qp: *mut ibv_qp) {
    for side in [Side::Send, Side::Receive] {
        // SAFETY: the caller vouches for `qp`.
        unsafe { with_ring(qp, side, |ring| ring.forget((*qp).qp_num, side)) };
    }
}

/// Records that a queue pair is in RESET: it takes nothing, and completions of before say nothing
/// about its room.
///
/// # Safety
/// `qp` is alive.
unsafe fn is_reset(qp: *mut ibv_qp) {
    // SAFETY: the caller vouches for `qp`, which `create` made as a `Pair`.
    let (is_reset, room, send_room) = unsafe {
        forget(qp);
        let pair = qp.cast::<Pair>();
        (&(*pair).is_reset, &(*pair).room, &(*pair).send_room)
    };
    room.count_anew(0);
    send_room.count_anew(0);
    is_reset.store(true, Relaxed);
}

/// Records that the next request may let messages take receives, which from now on are posted at
/// once.
///
/// # Safety
/// `qp` is alive.
pub(crate) unsafe fn leaves_init(qp: *mut ibv_qp) {
    // SAFETY: the caller vouches for `qp`, which `create` made as a `Pair`.
    unsafe { &(*qp.cast::<Pair>()).keeps }.store(false, Relaxed);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, attributes: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: ibv_create_qp(3): a live domain, and attributes that are read and written during the
    // call.
    pointer(unsafe { create(pd, &mut *attributes) })
}

/// `ibv_create_qp_ex(3)`.
pub(crate) unsafe extern "C" fn create_qp_ex(
    _context: *mut ibv_context,
    attributes: *mut PairAttributes,
) -> *mut ibv_qp {
    /// `IBV_QP_INIT_ATTR_PD` and `IBV_QP_INIT_ATTR_SEND_OPS_FLAGS`.
    const DOMAIN: u32 = 1;
    const OPERATIONS_KNOWN: u32 = 64;
    /// `IBV_QP_INIT_ATTR_CREATE_FLAGS`, of which none is supported.
    const FLAGS: u32 = 4;
    // SAFETY: ibv_create_qp_ex(3): attributes that are read during the call; fields that the mask
    // does not name may be uninitialised.
    let (mask, pd, flags, operations) = unsafe {
        let mask = (*attributes).comp_mask;
        let pd = if mask & DOMAIN == 0 { ptr::null_mut() } else { (*attributes).pd };
        let flags = if mask & FLAGS == 0 { 0 } else { (*attributes).create_flags };
        (mask, pd, flags, if mask & OPERATIONS_KNOWN == 0 { 0 } else { (*attributes).send_ops_flags })
    };
    // SAFETY: as above: a field without a flag.
    let known = if unsafe { (*attributes).qp_type } == IBV_QPT_UD { SENDS } else { OPERATIONS };
    if mask & !(DOMAIN | FLAGS | OPERATIONS_KNOWN) != 0 || flags != 0 || operations & !known != 0 {
        return pointer(Err(libc::EOPNOTSUPP));
    }
    if mask & DOMAIN == 0 {
        return pointer(Err(libc::EINVAL));
    }
    // SAFETY: as above: the attributes begin with the fields of the older ones, and are written;
    // the mask says that there is a domain.
    pointer(unsafe { create(pd, &mut *attributes.cast()) }.inspect(|qp| {
        // SAFETY: just made as a `Pair`.
        unsafe { (*qp.cast::<Pair>()).extended = mask & OPERATIONS_KNOWN != 0 };
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: ibv_destroy_qp(3): a queue pair from `ibv_create_qp`, in a box of a `Pair`.
    let handle = unsafe { name(qp) };
    let freed = ask(&Request::DestroyPair(handle));
    if freed.is_ok() {
        names::leave(handle);
        // SAFETY: as above.
        unsafe { forget(qp) };
        let pair: *mut Pair = qp.cast();
        // SAFETY: as above; alive until it is freed below.
        unsafe { &(*pair).events }.wait();
        // SAFETY: as above; the caller gives it up.
        drop(unsafe { Box::from_raw(pair) });
    }
    returned(freed)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attributes: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: ibv_modify_qp(3): attributes, of which this reads those in the mask.
    let attributes = unsafe { &*attributes };
    let mask = mask.cast_unsigned();
    // Errors are reported before any attribute changes (ibv_modify_qp(3)).
    // SAFETY: ibv_modify_qp(3): a live queue pair.
    let is_datagrams = unsafe { (*qp).qp_type } == IBV_QPT_UD;
    if mask & IBV_QP_TIMEOUT != 0 && attributes.timeout > MOST_TIMEOUT
        || mask & IBV_QP_QKEY != 0 && !is_datagrams
    {
        return libc::EINVAL;
    }
    // SAFETY: ibv_modify_qp(3): a live queue pair.
    let pair = unsafe {
        leaves_init(qp);
        name(qp)
    };
    let modify = |to: Transition| ask(&Request::Modify { pair, to });
    let stated = mask & IBV_QP_STATE != 0;
    let modified = match mask {
        // SAFETY: as above.
        _ if stated => transition(attributes, mask, is_datagrams, unsafe { (*qp).context }).and_then(modify),
        IBV_QP_MIN_RNR_TIMER => modify(Transition::Timer(attributes.min_rnr_timer)),
        IBV_QP_QKEY | IBV_QP_ACCESS_FLAGS => Ok(()),
        _ => Err(libc::EINVAL),
    };
    let modified = modified.and_then(|()| match mask & IBV_QP_TIMEOUT {
        0 => Ok(()),
        _ => ask(&Request::SetTimeout { pair, timeout: attributes.timeout }),
    });
    let modified = modified.and_then(|()| match mask & IBV_QP_ACCESS_FLAGS {
        0 => Ok(()),
        _ => ask(&Request::SetAccess { pair, access: on_wire(attributes.qp_access_flags) }),
    });
    let modified = modified.and_then(|()| match mask & IBV_QP_QKEY {
        0 => Ok(()),
        _ => ask(&Request::SetKey { pair, key: attributes.qkey }),
    });
    if modified.is_ok() {
        // SAFETY: as above.
        let set = unsafe { attributes_of(qp) };
        set.lock().unwrap_or_else(PoisonError::into_inner).merge(attributes, mask);
    }
    if modified.is_ok() && stated {
        // SAFETY: as above.
        unsafe {
            (*qp).state = attributes.qp_state;
            match attributes.qp_state {
                IBV_QPS_RESET => is_reset(qp),
                IBV_QPS_INIT => is_initialised(qp),
                _ => {}
            }
        }
    }
    returned(modified)
}

fn transition(
    attributes: &ibv_qp_attr,
    mask: u32,
    is_datagrams: bool,
    context: *const ibv_context,
) -> Result<Transition, c_int> {
    match attributes.qp_state {
        IBV_QPS_RESET => Ok(Transition::Reset),
        IBV_QPS_INIT => Ok(Transition::Initialise),
        IBV_QPS_RTR if is_datagrams => Ok(Transition::ReceiveDatagrams),
        IBV_QPS_RTR => {
            if mask & IBV_QP_AV == 0 {
                return Err(libc::EINVAL);
            }
            // SAFETY: the context of a queue pair, and so of a device.
            let (local, remote) = unsafe { handles::path(context, &attributes.ah_attr) }?;
            Ok(Transition::Receive {
                local,
                remote,
                number: attributes.dest_qp_num,
                timer: attributes.min_rnr_timer,
            })
        }
        IBV_QPS_RTS => Ok(Transition::Send {
            retry: attributes.retry_cnt,
            rnr_retry: attributes.rnr_retry,
            read_depth: attributes.max_rd_atomic,
        }),
        IBV_QPS_SQD => Ok(Transition::Drain {
            notify: mask & IBV_QP_EN_SQD_ASYNC_NOTIFY != 0 && attributes.en_sqd_async_notify != 0,
        }),
        IBV_QPS_ERR => Ok(Transition::Fail),
        // SQE: queue pairs here never enter it.
        _ => Err(libc::EINVAL),
    }
}

/// Fills in the attributes that move a queue pair to INIT. Returns their mask.
pub(crate) fn to_init(attributes: &mut ibv_qp_attr) -> u32 {
    (attributes.port_num, attributes.pkey_index) = (PORT, 0);
    attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PORT
}

/// Fills in the attributes that move a queue pair to RTR, with a peer of this number. Returns their
/// mask.
pub(crate) fn to_receive(
    attributes: &mut ibv_qp_attr,
    local: IpAddr,
    remote: IpAddr,
    peer: u32,
    reads: u8,
) -> u32 {
    set_path(&mut attributes.ah_attr, remote);
    attributes.ah_attr.grh.sgid_index = index_of(local);
    (attributes.path_mtu, attributes.dest_qp_num, attributes.rq_psn) = (5, peer, 0);
    (attributes.max_dest_rd_atomic, attributes.min_rnr_timer) = (reads, 0);
    let path = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN;
    IBV_QP_STATE | path | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER
}

/// Fills in the attributes that move a queue pair to RTS, with what the peer offers. Returns their
/// mask.
pub(crate) fn to_send(attributes: &mut ibv_qp_attr, theirs: Params, retry: u8) -> u32 {
    (attributes.timeout, attributes.retry_cnt, attributes.rnr_retry) = (14, retry, theirs.rnr_retry_count);
    (attributes.sq_psn, attributes.max_rd_atomic) = (0, theirs.responder_resources);
    let retries = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY;
    IBV_QP_STATE | retries | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC
}

/// Sets the address to which a path leads.
pub(crate) fn set_path(path: &mut ibv_ah_attr, remote: IpAddr) {
    path.is_global = 1;
    path.port_num = PORT;
    path.grh.dgid = ibv_gid { raw: gid(remote) };
}

pub(crate) const fn bytes(gid: ibv_gid) -> [u8; 16] {
    // SAFETY: both variants of the union are plain bytes of this length, all of them initialised by
    // its maker.
    unsafe { gid.raw }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attributes: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: ibv_query_qp(3): a live queue pair, which `create` made as a `Pair`; these fields do
    // not change.
    let (handle, set, cap, all_signaled) = unsafe {
        let pair = qp.cast::<Pair>();
        (name(qp), attributes_of(qp), (*pair).cap, (*pair).all_signaled)
    };
    let (state, ends) = match call(&Request::QueryPair(handle)) {
        Ok(Reply::State { state, ends }) => (u32::from(state), ends),
        Ok(_) => return libc::EPROTO,
        Err(errno) => return errno,
    };
    let mut answer: ibv_qp_attr = zeroed();
    answer.qp_state = state;
    answer.cur_qp_state = state;
    let set = *set.lock().unwrap_or_else(PoisonError::into_inner);
    answer.path_mtu = if set.mtu == 0 { 5 } else { set.mtu };
    (answer.qp_access_flags, answer.sq_psn, answer.rq_psn) = (set.access, set.send_psn, set.receive_psn);
    (answer.max_rd_atomic, answer.max_dest_rd_atomic) = (set.read_depth, set.answered_reads);
    (answer.min_rnr_timer, answer.timeout) = (set.rnr_timer, set.timeout);
    (answer.retry_cnt, answer.rnr_retry, answer.qkey) = (set.retry, set.rnr_retry, set.key);
    answer.cap = cap;
    answer.port_num = PORT;
    if let Some((local, remote, number)) = ends {
        answer.dest_qp_num = number;
        set_path(&mut answer.ah_attr, remote);
        answer.ah_attr.grh.sgid_index = index_of(local);
    }
    // SAFETY: as above.
    let made = unsafe {
        ibv_qp_init_attr {
            qp_context: (*qp).qp_context,
            send_cq: (*qp).send_cq,
            recv_cq: (*qp).recv_cq,
            srq: (*qp).srq,
            cap,
            qp_type: (*qp).qp_type,
            sq_sig_all: all_signaled.into(),
        }
    };
    // SAFETY: ibv_query_qp(3): places for both answers. The program reads the state in its own
    // structure.
    unsafe {
        attributes.write(answer);
        init.write(made);
        (*qp).state = state;
    }
    0
}

/// Says that the bytes of a message may become visible in any order, as of most devices.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_query_qp_data_in_order(_qp: *mut ibv_qp, _opcode: c_uint, _flags: u32) -> c_int {
    0
}

/// Returns the index of an address in the table of the device that has it.
fn index_of(address: IpAddr) -> u8 {
    let place = |device: &Attached| device.addresses.iter().position(|own| *own == address);
    let index = link().ok().and_then(|link| link.devices.iter().find_map(place));
    index.and_then(|index| u8::try_from(index).ok()).unwrap_or(0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut PairEx {
    // SAFETY: ibv_qp_to_qp_ex(3): a live queue pair, which `create` made as a `Pair`.
    if unsafe { (*qp.cast::<Pair>()).extended } {
        qp.cast()
    } else {
        // It was not made for `ibv_wr_post(3)`.
        ptr::null_mut()
    }
}
