//! Shared receive queues.

use core::ffi::{c_int, c_void};

use softrdma_wire::{Name, Receive, Reply, Request};

use crate::acknowledged::Unacknowledged;
use crate::chain::{chain, conclude, elements, on_wire};
use crate::cm::identifier;
use crate::device::MAX_SGE;
use crate::layout::{
    SharedAttributes, SharedAttributesEx, SharedLimits, SharedQueue, ibv_context, ibv_pd, ibv_recv_wr,
    ibv_srq, rdma_cm_id, zeroed,
};
use crate::link::{ask, call, concluded, make, pointer, returned};
use crate::names;

/// A shared receive queue, and the parameters that it was made with.
#[repr(C)]
pub(crate) struct Shared {
    srq: SharedQueue,
    depth: u32,
    most_elements: u32,
    pub(crate) events: Unacknowledged,
}

/// Makes a shared receive queue.
///
/// # Safety
/// `pd` is alive.
unsafe fn create(
    pd: *mut ibv_pd,
    srq_context: *mut c_void,
    limits: &mut SharedLimits,
) -> Result<*mut ibv_srq, c_int> {
    if limits.max_sge > MAX_SGE.cast_unsigned() {
        return Err(libc::EINVAL);
    }
    // ibv_create_srq(3) ignores the limit, which ibv_modify_srq(3) sets.
    (limits.max_sge, limits.srq_limit) = (limits.max_sge.max(1), 0);
    // SAFETY: the caller vouches for the domain.
    let (context, domain) = unsafe { ((*pd).context, (*pd).handle) };
    let elements = limits.max_sge as u8;
    let handle = make(&Request::CreateShared { domain, depth: limits.max_wr, limit: 0, elements })?;
    let srq = SharedQueue { context, srq_context, pd, handle, ..zeroed() };
    let (depth, most_elements) = (limits.max_wr, limits.max_sge);
    let shared = Shared { srq, depth, most_elements, events: Unacknowledged::default() };
    let shared = Box::into_raw(Box::new(shared));
    names::enter(handle, shared);
    Ok(shared.cast())
}

/// Returns the queue's name in the fabric; `None` if it is null.
///
/// # Safety
/// `srq` is null or alive.
pub(crate) unsafe fn name(srq: *mut ibv_srq) -> Option<Name> {
    // SAFETY: made as a `Shared` by `create`, if it is not null.
    (!srq.is_null()).then(|| unsafe { (*srq.cast::<Shared>()).srq.handle })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_srq(pd: *mut ibv_pd, attributes: *mut SharedAttributes) -> *mut ibv_srq {
    // SAFETY: ibv_create_srq(3): a live domain, and attributes that are read and written during the
    // call.
    pointer(unsafe { create(pd, (*attributes).srq_context, &mut (*attributes).attr) })
}

/// `ibv_create_srq_ex(3)`.
pub(crate) unsafe extern "C" fn create_srq_ex(
    _context: *mut ibv_context,
    attributes: *mut SharedAttributesEx,
) -> *mut ibv_srq {
    /// `IBV_SRQ_INIT_ATTR_TYPE` and `IBV_SRQ_INIT_ATTR_PD`.
    const TYPE: u32 = 1;
    const DOMAIN: u32 = 2;
    /// `IBV_SRQT_BASIC`.
    const BASIC: u32 = 0;
    // SAFETY: ibv_create_srq_ex(3): attributes that are read and written during the call.
    let attributes = unsafe { &mut *attributes };
    let typed = attributes.comp_mask & TYPE != 0;
    pointer(if attributes.comp_mask & !(TYPE | DOMAIN) != 0 || (typed && attributes.srq_type != BASIC) {
        Err(libc::EOPNOTSUPP)
    } else if attributes.comp_mask & DOMAIN == 0 {
        Err(libc::EINVAL)
    } else {
        // SAFETY: as above: the mask says that there is a domain.
        unsafe { create(attributes.pd, attributes.srq_context, &mut attributes.attr) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    let shared: *mut Shared = srq.cast();
    // SAFETY: ibv_destroy_srq(3): a queue from `create`, in a box of a `Shared`.
    let handle = unsafe { (*shared).srq.handle };
    let freed = ask(&Request::DestroyShared(handle));
    if freed.is_ok() {
        names::leave(handle);
        // SAFETY: as above; alive until it is freed below.
        unsafe { &(*shared).events }.wait();
        // SAFETY: as above; no queue pair uses it, and the caller gives it up.
        drop(unsafe { Box::from_raw(shared) });
    }
    returned(freed)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_srq(
    srq: *mut ibv_srq,
    attributes: *mut SharedLimits,
    mask: c_int,
) -> c_int {
    /// `IBV_SRQ_LIMIT`. The other flag is `IBV_SRQ_MAX_WR`, for devices that can resize a queue.
    const LIMIT: c_int = 2;
    if mask != LIMIT {
        return if mask == 0 { libc::EINVAL } else { libc::EOPNOTSUPP };
    }
    // SAFETY: ibv_modify_srq(3): a live queue, and attributes, of which this reads those in the
    // mask.
    let (queue, limit) = unsafe { ((*srq.cast::<Shared>()).srq.handle, (*attributes).srq_limit) };
    returned(ask(&Request::SetSharedLimit { queue, limit }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_srq(srq: *mut ibv_srq, attributes: *mut SharedLimits) -> c_int {
    // SAFETY: ibv_query_srq(3): a live queue, which `create` made as a `Shared`.
    let (queue, max_wr, max_sge) = unsafe {
        let shared = srq.cast::<Shared>();
        ((*shared).srq.handle, (*shared).depth, (*shared).most_elements)
    };
    let srq_limit = match call(&Request::QueryShared(queue)) {
        Ok(Reply::SharedLimit(limit)) => limit,
        Ok(_) => return libc::EPROTO,
        Err(errno) => return errno,
    };
    let limits = SharedLimits { max_wr, max_sge, srq_limit };
    // SAFETY: ibv_query_srq(3): a place for the answer.
    unsafe { attributes.write(limits) };
    0
}

pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: ibv_post_srq_recv(3): a live queue, which `create` made as a `Shared`.
    let (queue, most) = unsafe {
        let shared = srq.cast::<Shared>();
        ((*shared).srq.handle, (*shared).most_elements)
    };
    let posted = chain(
        first,
        // SAFETY: ibv_post_srq_recv(3): a list of requests, each linked to the next or to none.
        |wr| unsafe { (*wr).next },
        // SAFETY: as above.
        |wr| unsafe {
            Ok(Receive { id: (*wr).wr_id, local: on_wire(elements((*wr).sg_list, (*wr).num_sge, most)?) })
        },
        |work| call(&Request::PostShared { queue, work }),
    );
    // SAFETY: ibv_post_srq_recv(3): a place for the pointer to the refused request.
    unsafe { conclude(posted, bad) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_srq(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attributes: *mut SharedAttributes,
) -> c_int {
    // SAFETY: rdma_create_srq(3): a live identifier.
    let id = unsafe { &mut identifier(id).id };
    let pd = if pd.is_null() { id.pd } else { pd };
    if pd.is_null() || !id.srq.is_null() {
        return concluded(Err(libc::EINVAL));
    }
    // SAFETY: rdma_create_srq(3): a live domain, and attributes that are read and written.
    let made = unsafe { create(pd, (*attributes).srq_context, &mut (*attributes).attr) };
    concluded(made.map(|srq| (id.srq, id.pd) = (srq, pd)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_destroy_srq(id: *mut rdma_cm_id) {
    // SAFETY: rdma_destroy_srq(3): a live identifier.
    let id = unsafe { &mut identifier(id).id };
    if !id.srq.is_null() {
        // SAFETY: the identifier's own queue, which the caller gives up.
        unsafe { ibv_destroy_srq(id.srq) };
        id.srq = core::ptr::null_mut();
    }
}
