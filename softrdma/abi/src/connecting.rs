//! Connects and disconnects identifiers: `rdma_connect(3)`, `rdma_accept(3)` and the calls around
//! them.

use core::ffi::{c_int, c_void};

use softrdma_wire::{Connected, Name, Params, Reply, Request};

use crate::cm::{complete, identifier};
use crate::layout::{
    IBV_EVENT_COMM_EST, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, ibv_qp_attr, rdma_cm_id, rdma_conn_param,
};
use crate::link::{ask, call, concluded, link};
use crate::pair;

/// Reads connection parameters from C. Null stands for the most that the device can do, as in
/// librdmacm.
///
/// # Safety
/// `params` is null, or alive during `'a` together with the private data that it names.
unsafe fn parameters<'a>(params: *const rdma_conn_param) -> Result<(Params, &'a [u8]), c_int> {
    /// `RDMA_MAX_RESP_RES` and `RDMA_MAX_INIT_DEPTH`: the most that the device can do.
    const AS_MANY_AS_THERE_ARE: u8 = 0xff;
    let most = link()?.limits.max_qp_rd_atom;
    let depth = |asked: u8| if asked == AS_MANY_AS_THERE_ARE { most } else { asked };
    // SAFETY: the caller vouches for `params`.
    let Some(given) = (unsafe { params.as_ref() }) else {
        let all =
            Params { responder_resources: most, initiator_depth: most, retry_count: 7, rnr_retry_count: 7 };
        return Ok((all, &[]));
    };
    let params = Params {
        responder_resources: depth(given.responder_resources),
        initiator_depth: depth(given.initiator_depth),
        // The fields have three bits.
        retry_count: given.retry_count.min(7),
        rnr_retry_count: given.rnr_retry_count.min(7),
    };
    let len = usize::from(given.private_data_len);
    if given.private_data.is_null() || len == 0 {
        return Ok((params, &[]));
    }
    // SAFETY: the caller vouches for the private data.
    Ok((params, unsafe { std::slice::from_raw_parts(given.private_data.cast(), len) }))
}

/// Returns the identifier's queue pair, or the external one that the program names by its number.
///
/// # Safety
/// `params` is null or alive.
unsafe fn own_pair(id: &rdma_cm_id, params: *const rdma_conn_param) -> Result<Connected, c_int> {
    if id.qp.is_null() {
        // SAFETY: the caller vouches for `params`.
        let number = unsafe { params.as_ref() }.map_or(0, |params| params.qp_num);
        return if number == 0 { Err(libc::EINVAL) } else { Ok(Connected::External(number)) };
    }
    // SAFETY: alive for as long as the identifier names it.
    unsafe {
        pair::leaves_init(id.qp);
        Ok(Connected::Managed(pair::name(id.qp)))
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_connect(id: *mut rdma_cm_id, params: *mut rdma_conn_param) -> c_int {
    let connect = || {
        // SAFETY: rdma_connect(3): a live identifier.
        let identifier = unsafe { identifier(id) };
        // SAFETY: rdma_connect(3): parameters that are read during the call, or null.
        let (pair, (params, data)) = unsafe { (own_pair(&identifier.id, params)?, parameters(params)?) };
        ask(&Request::Connect { id: identifier.name, pair, params, data })
    };
    // SAFETY: as above.
    concluded(connect().and_then(|()| unsafe { complete(id) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_accept(id: *mut rdma_cm_id, params: *mut rdma_conn_param) -> c_int {
    let accept = || {
        // SAFETY: rdma_accept(3): a live identifier.
        let identifier = unsafe { identifier(id) };
        // SAFETY: rdma_accept(3): parameters that are read during the call, or null.
        let (pair, (params, data)) = unsafe { (own_pair(&identifier.id, params)?, parameters(params)?) };
        ask(&Request::Accept { id: identifier.name, pair, params, data })?;
        // SAFETY: null, or the identifier's own queue pair, which is alive.
        if let Some(qp) = unsafe { identifier.id.qp.as_mut() } {
            qp.state = IBV_QPS_RTS;
        }
        Ok(())
    };
    // SAFETY: as above.
    concluded(accept().and_then(|()| unsafe { complete(id) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_reject(id: *mut rdma_cm_id, data: *const c_void, len: u8) -> c_int {
    let data = if data.is_null() || len == 0 {
        &[]
    } else {
        // SAFETY: rdma_reject(3): `len` bytes, which are read during the call.
        unsafe { std::slice::from_raw_parts(data.cast(), len.into()) }
    };
    // SAFETY: rdma_reject(3): a live identifier.
    concluded(ask(&Request::Reject { id: unsafe { identifier(id) }.name, data }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, event: u32) -> c_int {
    if event != IBV_EVENT_COMM_EST {
        return concluded(Err(libc::EINVAL));
    }
    // SAFETY: rdma_notify(3): a live identifier.
    concluded(ask(&Request::Notify(unsafe { identifier(id) }.name)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_establish(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: rdma_establish(3): a live identifier.
    let identifier = unsafe { identifier(id) };
    // Only for connections whose queue pair the program itself moves to RTS.
    let asked = if identifier.id.qp.is_null() { Ok(identifier.name) } else { Err(libc::EINVAL) };
    concluded(asked.and_then(|name| ask(&Request::Establish(name))))
}

/// `rdma_init_qp_attr(3)`: fills in the attributes that `ibv_modify_qp(3)` needs to move an
/// external queue pair to the state that they name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_init_qp_attr(
    id: *mut rdma_cm_id,
    attributes: *mut ibv_qp_attr,
    mask: *mut c_int,
) -> c_int {
    // SAFETY: rdma_init_qp_attr(3): a live identifier, attributes that state the target state, and
    // a place for the mask.
    let (identifier, attributes, mask) = unsafe { (identifier(id), &mut *attributes, &mut *mask) };
    concluded(fill_attributes(identifier.name, attributes).map(|told| *mask = told.cast_signed()))
}

/// Fills in the attributes that move the external queue pair of an identifier to the state that
/// they name. Returns their mask.
pub(crate) fn fill_attributes(id: Name, attributes: &mut ibv_qp_attr) -> Result<u32, c_int> {
    match attributes.qp_state {
        IBV_QPS_INIT => Ok(pair::to_init(attributes)),
        IBV_QPS_RTR | IBV_QPS_RTS => match call(&Request::Offered(id))? {
            Reply::Offered { local, remote, peer, theirs, .. } if attributes.qp_state == IBV_QPS_RTR => {
                Ok(pair::to_receive(attributes, local, remote, peer, theirs.initiator_depth))
            }
            Reply::Offered { theirs, retry, .. } => Ok(pair::to_send(attributes, theirs, retry)),
            _ => Err(libc::EPROTO),
        },
        _ => Err(libc::EINVAL),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: rdma_disconnect(3): a live identifier.
    let asked = ask(&Request::Disconnect(unsafe { identifier(id) }.name));
    // SAFETY: as above.
    concluded(asked.and_then(|()| unsafe { complete(id) }))
}
