//! The queue pair: posting work.

use core::ffi::c_int;
use core::iter;
use core::mem::MaybeUninit;
use core::ptr::{self, NonNull};
use std::sync::Arc;

use rdma_backend::{
    self, Immediate, PostError, QueuePairLimits, RecvRequest, RemoteAddress, RnrTimer, SendOp, SendRequest,
};

use crate::Verbs;
use crate::asynchronous;
use crate::chain::{BATCH, in_batches, position, recv_chain, refused};
use crate::completion::{CompletionQueue, Queue};
use crate::error::{Error, Stage};
use crate::identifier::CmId;
use crate::region::{Domain, Pd, Region};
use crate::sys::{
    self, Work, generated as c, ibv_gid, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr,
    ibv_sge, rdma_cm_id,
};

type PostSend = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
type PostRecv = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;

/// A reliable-connected queue pair, `rdma_create_qp(3)`.
#[derive(Debug)]
pub struct QueuePair {
    raw: NonNull<ibv_qp>,
    post_send: PostSend,
    post_recv: PostRecv,
    number: u32,
    max_inline: usize,
    // These outlive it: it is destroyed in `drop`.
    id: Arc<CmId>,
    _completions: Arc<Queue>,
    domain: Arc<Pd>,
}

// SAFETY: any number of threads may post at once: verbs objects are safe for multi-threaded access
// (ibv_alloc_td(3)). State changes and destruction happen under the lock of its identifier.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    pub(crate) fn create(
        id: &Arc<CmId>,
        domain: &Domain,
        completions: &CompletionQueue,
        limits: QueuePairLimits,
    ) -> Result<Self, Error> {
        Error::unless_forked()?;
        let (domain, queue) = (&domain.inner, &completions.inner);
        if limits.send_depth.max(limits.recv_depth) > domain.device().capabilities()?.max_queue_depth {
            return Err(Error::Argument("a queue takes fewer work requests: see the device's capabilities"));
        }
        id.hear_device()?;
        id.with(|raw_id| {
            // SAFETY: a live identifier, whose lock is held.
            let (verbs, existing) = unsafe { ((*raw_id).verbs, (*raw_id).qp) };
            if !existing.is_null() {
                return Err(Error::State("the identifier has its queue pair already"));
            }
            if domain.device().context() != verbs || queue.device().context() != verbs {
                return Err(Error::Argument(
                    "the domain and the completion queue must be of the identifier's device",
                ));
            }
            // SAFETY: all four are alive, of one device, and the identifier's lock is held.
            let max_inline = match unsafe { create(raw_id, domain, queue, limits) } {
                // Devices refuse what they cannot grant instead of granting less.
                Err(Error::Call { errno: libc::EINVAL | libc::ENOMEM, .. }) if limits.inline > 0 => {
                    let limits = QueuePairLimits { inline: 0, ..limits };
                    // SAFETY: as above.
                    unsafe { create(raw_id, domain, queue, limits) }?
                }
                other => other?,
            };
            // SAFETY: rdma_create_qp(3) succeeded and left the queue pair here.
            let raw = unsafe { (*raw_id).qp };
            let raw = NonNull::new(raw).ok_or(Error::State("the identifier has no queue pair"))?;
            // SAFETY: the queue pair is alive; its number and context's table never change.
            let (number, post_send, post_recv) =
                unsafe { ((*raw.as_ptr()).qp_num, (*verbs).ops.post_send, (*verbs).ops.post_recv) };
            let (Some(post_send), Some(post_recv)) = (post_send, post_recv) else {
                // SAFETY: rdma_destroy_qp(3): the identifier has a queue pair, used by nothing.
                unsafe { (domain.device().api.rdma_destroy_qp)(raw_id) };
                return Err(Error::State("the device's provider cannot post work requests"));
            };
            asynchronous::set_pair(id.key(), raw.as_ptr(), queue.as_ptr());
            Ok(Self {
                raw,
                post_send,
                post_recv,
                number,
                max_inline,
                id: Arc::clone(id),
                _completions: Arc::clone(queue),
                domain: Arc::clone(domain),
            })
        })
    }

    /// Posts the first `MOST` of `requests` as a chain, by one doorbell.
    #[inline]
    fn post_send_batch<const MOST: usize>(
        &self,
        requests: &[SendRequest<'_, Region>],
    ) -> Result<(), PostError<Error>> {
        let mut elements = [const { MaybeUninit::<ibv_sge>::uninit() }; MOST];
        let mut works = [const { MaybeUninit::<ibv_send_wr>::uninit() }; MOST];
        // Both pointers serve for all below, so that links between requests stay valid.
        let elements = elements.as_mut_ptr().cast::<ibv_sge>();
        let works = works.as_mut_ptr().cast::<ibv_send_wr>();
        let mut count = 0;
        let mut fault = None;
        for request in requests.iter().take(MOST) {
            let element = match self.check_send(request) {
                Ok(element) => element,
                Err(error) => {
                    fault = Some(error);
                    break;
                }
            };
            // The list always points to a written element: erdma and cxgb4 look at the first
            // without looking at the number (of a READ; cxgb4 also of a WRITE).
            let num_sge = c_int::from(element.length != 0);
            // SAFETY: `count` is below MOST, the length of the array.
            let sge = unsafe { elements.add(count) };
            // SAFETY: as above: in bounds, of this type, and not borrowed.
            unsafe { sge.write(element) };
            // SAFETY: as above.
            unsafe { sys::write_send_wr(works.add(count), &work(request), sge, num_sge) };
            if count > 0 {
                // SAFETY: both are in bounds; the one before was written in the previous round.
                unsafe { (*works.add(count - 1)).next = works.add(count) };
            }
            count += 1;
        }
        if count > 0 {
            let mut bad = works;
            // SAFETY: ibv_post_send(3): a live queue pair, and a null-terminated chain of `count`
            // requests, with elements inside regions of its domain; what the call reads for each
            // operation is written. It copies requests, elements and inline bytes. Other bytes the
            // device reads later, from registered memory; it refuses if the region was dropped.
            let result = unsafe { (self.post_send)(self.raw.as_ptr(), works, &raw mut bad) };
            if result != 0 {
                return Err(refused("ibv_post_send", result, position(works, bad, count)));
            }
        }
        match fault {
            None => Ok(()),
            Some(error) => Err(PostError { posted: count, error }),
        }
    }

    #[inline]
    fn post_recv_batch<const MOST: usize>(
        &self,
        receives: impl Iterator<Item = Result<(u64, ibv_sge), Error>>,
    ) -> Result<(), PostError<Error>> {
        recv_chain::<MOST>(receives, |first, bad| {
            // SAFETY: ibv_post_recv(3): as for ibv_post_send above.
            unsafe { (self.post_recv)(self.raw.as_ptr(), first, bad) }
        })
    }

    #[inline(never)]
    fn post_send_chain(&self, requests: &[SendRequest<'_, Region>]) -> Result<(), PostError<Error>> {
        in_batches(requests, |batch| self.post_send_batch::<BATCH>(batch))
    }

    #[inline(never)]
    fn post_recv_chain(&self, requests: &[RecvRequest<'_, Region>]) -> Result<(), PostError<Error>> {
        in_batches(requests, |batch| {
            self.post_recv_batch::<BATCH>(batch.iter().map(|request| self.check_recv(request)))
        })
    }

    #[inline]
    fn check_recv(&self, request: &RecvRequest<'_, Region>) -> Result<(u64, ibv_sge), Error> {
        Ok((request.id, Region::element(&request.local, &self.domain)?))
    }

    #[inline]
    fn check_send(&self, request: &SendRequest<'_, Region>) -> Result<ibv_sge, Error> {
        if request.inline {
            if matches!(request.op, SendOp::Read(_)) {
                return Err(Error::Argument("a READ cannot be inline"));
            }
            if request.local.len > self.max_inline {
                return Err(Error::Argument("more bytes than the queue pair takes inline"));
            }
        }
        Region::element(&request.local, &self.domain)
    }
}

#[inline(always)]
fn unless_forked() -> Result<(), PostError<Error>> {
    Error::unless_forked().map_err(|error| PostError { posted: 0, error })
}

/// Returns how many bytes the queue pair takes inline.
///
/// # Safety
/// The identifier is alive, its lock held; it, the domain and the queue are of one device.
unsafe fn create(
    id: *mut rdma_cm_id,
    domain: &Pd,
    queue: &Queue,
    limits: QueuePairLimits,
) -> Result<usize, Error> {
    let mut attributes: ibv_qp_init_attr = sys::zeroed();
    attributes.send_cq = queue.as_ptr();
    attributes.recv_cq = queue.as_ptr();
    attributes.qp_type = c::IBV_QPT_RC;
    attributes.sq_sig_all = 0;
    attributes.cap.max_send_wr = limits.send_depth;
    attributes.cap.max_recv_wr = limits.recv_depth;
    attributes.cap.max_send_sge = 1;
    attributes.cap.max_recv_sge = 1;
    attributes.cap.max_inline_data = limits.inline;
    // SAFETY: rdma_create_qp(3): everything is alive and of one device; both queues are given, so
    // the library makes none; it writes what was granted into `attributes`, a live structure.
    let result = unsafe { (domain.device().api.rdma_create_qp)(id, domain.as_ptr(), &raw mut attributes) };
    if result == 0 {
        Ok(attributes.cap.max_inline_data as usize)
    } else {
        Err(Error::last("rdma_create_qp", Stage::Connection))
    }
}

#[inline]
fn work(request: &SendRequest<'_, Region>) -> Work {
    const NOWHERE: RemoteAddress = RemoteAddress { address: 0, rkey: 0 };
    let (opcode, remote, immediate) = match request.op {
        SendOp::Send => (c::IBV_WR_SEND, NOWHERE, Immediate(0)),
        SendOp::SendImmediate(immediate) => (c::IBV_WR_SEND_WITH_IMM, NOWHERE, immediate),
        SendOp::Write(to) => (c::IBV_WR_RDMA_WRITE, to, Immediate(0)),
        // iWARP has no such operation (VR-CONN-013).
        SendOp::WriteImmediate(to, immediate) => (c::IBV_WR_RDMA_WRITE_WITH_IMM, to, immediate),
        SendOp::Read(from) => (c::IBV_WR_RDMA_READ, from, Immediate(0)),
    };
    let mut flags = 0;
    if request.signaled {
        flags |= c::IBV_SEND_SIGNALED;
    }
    if request.inline {
        flags |= c::IBV_SEND_INLINE;
    }
    Work {
        id: request.id,
        opcode,
        flags,
        immediate: immediate.0.to_be(),
        remote: (remote.address, remote.rkey),
    }
}

fn gid_bytes(gid: &ibv_gid) -> [u8; 16] {
    const { assert!(size_of::<ibv_gid>() == 16) };
    // SAFETY: in each arm of the union a GID is 16 bytes without padding, all valid.
    unsafe { ptr::from_ref(gid).cast::<[u8; 16]>().read() }
}

impl rdma_backend::QueuePair<Verbs> for QueuePair {
    fn number(&self) -> u32 {
        self.number
    }

    fn max_inline(&self) -> usize {
        self.max_inline
    }

    #[inline]
    fn post_send(&self, requests: &[SendRequest<'_, Region>]) -> Result<(), PostError<Error>> {
        unless_forked()?;
        // Nearly all chains have one request, which needs no table on the stack.
        match requests {
            [_] => self.post_send_batch::<1>(requests),
            _ => self.post_send_chain(requests),
        }
    }

    #[inline]
    fn post_recv(&self, requests: &[RecvRequest<'_, Region>]) -> Result<(), PostError<Error>> {
        unless_forked()?;
        match requests {
            [request] => self.post_recv_batch::<1>(iter::once(self.check_recv(request))),
            _ => self.post_recv_chain(requests),
        }
    }

    fn set_min_rnr_timer(&self, timer: RnrTimer) -> Result<(), Error> {
        let mut attributes: ibv_qp_attr = sys::zeroed();
        attributes.min_rnr_timer = timer.code();
        // Without IBV_QP_STATE the state stays. The timer alone may change only in RTS.
        self.id.with(|_| {
            // SAFETY: ibv_modify_qp(3): a live queue pair; only the masked attribute is read.
            let result = unsafe {
                (self.domain.device().api.ibv_modify_qp)(
                    self.raw.as_ptr(),
                    &raw mut attributes,
                    c::IBV_QP_MIN_RNR_TIMER as c_int,
                )
            };
            match result {
                0 => Ok(()),
                result => Err(Error::returned("ibv_modify_qp", result, Stage::Connection)),
            }
        })
    }

    fn is_loopback(&self) -> Result<bool, Error> {
        let attributes = self.query(c::IBV_QP_STATE | c::IBV_QP_AV)?;
        if matches!(attributes.qp_state, c::IBV_QPS_RESET | c::IBV_QPS_INIT) {
            return Err(Error::State("a queue pair has a path once it is connected"));
        }
        let path = &attributes.ah_attr;
        let device = self.domain.device();
        if path.is_global == 0 {
            // InfiniBand within a subnet: the path is a pair of local identifiers.
            return Ok(path.dlid != 0 && path.dlid == device.lid(path.port_num)?);
        }
        // RoCE, and InfiniBand between subnets.
        let own = device.gid(path.port_num, path.grh.sgid_index)?;
        Ok(gid_bytes(&path.grh.dgid) == gid_bytes(&own))
    }

    fn has_failed(&self) -> Result<bool, Error> {
        Ok(self.query(c::IBV_QP_STATE)?.qp_state == c::IBV_QPS_ERR)
    }
}

impl QueuePair {
    fn query(&self, mask: u32) -> Result<ibv_qp_attr, Error> {
        let mut attributes: ibv_qp_attr = sys::zeroed();
        let mut init: ibv_qp_init_attr = sys::zeroed();
        self.id.with(|_| {
            // SAFETY: ibv_query_qp(3): a live queue pair, and live structures of the right types.
            let result = unsafe {
                (self.domain.device().api.ibv_query_qp)(
                    self.raw.as_ptr(),
                    &raw mut attributes,
                    mask as c_int,
                    &raw mut init,
                )
            };
            match result {
                0 => Ok(attributes),
                result => Err(Error::returned("ibv_query_qp", result, Stage::Connection)),
            }
        })
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if rdma_process::is_child() {
            return;
        }
        // A new queue pair may reuse its address.
        asynchronous::set_pair(self.id.key(), ptr::null(), ptr::null());
        let _never_fails = self.id.with(|id| {
            // SAFETY: rdma_destroy_qp(3): the identifier's queue pair is this one: it gets no
            // second. No other pointer to it exists, and the lock keeps the event loop out.
            unsafe { (self.domain.device().api.rdma_destroy_qp)(id) };
            Ok(())
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_work_request_its_operation_is_written() {
        let work = Work { id: 7, opcode: c::IBV_WR_RDMA_WRITE, flags: 2, immediate: 5, remote: (11, 13) };
        let mut element = ibv_sge { addr: 1, length: 2, lkey: 3 };
        let mut place = MaybeUninit::<ibv_send_wr>::uninit();
        let to = place.as_mut_ptr();
        // SAFETY: a live structure.
        unsafe { sys::write_send_wr(to, &work, &raw mut element, 1) };
        // SAFETY: integers and pointers, all written: Miri would report it otherwise.
        unsafe {
            assert_eq!(((*to).wr_id, (*to).opcode, (*to).send_flags), (7, work.opcode, 2));
            assert!((*to).next.is_null() && (*to).sg_list == &raw mut element && (*to).num_sge == 1);
            assert_eq!(sys::send_wr_immediate(to).read(), 5);
            assert_eq!(((*to).wr.rdma.remote_addr, (*to).wr.rdma.rkey), (11, 13));
            assert_eq!((*to).wr.ud.remote_qkey, 0);
        }
    }
}
