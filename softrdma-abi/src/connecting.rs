//! `rdma_connect(3)`, `rdma_accept(3)` and what else brings identifiers together and apart.

use core::ffi::{c_int, c_void};

use softrdma_wire::{Name, Params, Request};

use crate::cm::{complete, identifier};
use crate::layout::{IBV_EVENT_COMM_EST, IBV_QPS_RTS, rdma_cm_id, rdma_conn_param};
use crate::link::{ask, concluded, link};
use crate::pair;

/// What connection parameters of C say; null stands for as much as the device can, as in librdmacm.
///
/// # Safety
/// `params` is null, or alive together with the private data that it names, for `'a`.
unsafe fn parameters<'a>(params: *const rdma_conn_param) -> Result<(Params, &'a [u8]), c_int> {
    /// `RDMA_MAX_RESP_RES` and `RDMA_MAX_INIT_DEPTH`.
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
        // Fields of three bits.
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

/// The identifier's queue pair. One that the program made elsewhere and names by number is not there.
fn own_pair(id: &rdma_cm_id) -> Result<Name, c_int> {
    if id.qp.is_null() {
        static TOLD: core::sync::atomic::AtomicBool = core::sync::atomic::AtomicBool::new(false);
        crate::missing::lacking("a connection without the queue pair of rdma_create_qp", &TOLD);
        return Err(libc::EOPNOTSUPP);
    }
    // SAFETY: alive for as long as the identifier names it.
    Ok(unsafe { pair::name(id.qp) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_connect(id: *mut rdma_cm_id, params: *mut rdma_conn_param) -> c_int {
    let connect = || {
        // SAFETY: rdma_connect(3): a live identifier.
        let identifier = unsafe { identifier(id) };
        // SAFETY: rdma_connect(3): parameters that are read during the call, or null.
        let (params, data) = unsafe { parameters(params) }?;
        ask(&Request::Connect { id: identifier.name, pair: own_pair(&identifier.id)?, params, data })
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
        let (params, data) = unsafe { parameters(params) }?;
        ask(&Request::Accept { id: identifier.name, pair: own_pair(&identifier.id)?, params, data })?;
        // SAFETY: its own, which is alive.
        unsafe { (*identifier.id.qp).state = IBV_QPS_RTS };
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
        // SAFETY: rdma_reject(3): so many bytes, which are read during the call.
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
pub unsafe extern "C" fn rdma_establish(_id: *mut rdma_cm_id) -> c_int {
    // rdma_establish(3): for connections whose queue pair the program makes ready; here the library did.
    concluded(Err(libc::EINVAL))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: rdma_disconnect(3): a live identifier.
    let asked = ask(&Request::Disconnect(unsafe { identifier(id) }.name));
    // SAFETY: as above.
    concluded(asked.and_then(|()| unsafe { complete(id) }))
}
