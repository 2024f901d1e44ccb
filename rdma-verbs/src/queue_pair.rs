//! The queue pair: posting work.

use core::ffi::c_int;
use core::mem::MaybeUninit;
use core::ptr::{self, NonNull};
use std::sync::Arc;

use rdma_proto::backend::{
    self, Immediate, PostError, QueuePairLimits, RecvRequest, RemoteAddress, RnrTimer, SendOp, SendRequest,
};

use crate::Verbs;
use crate::asynchronous;
use crate::completion::{CompletionQueue, Queue};
use crate::error::{Error, Stage};
use crate::identifier::CmId;
use crate::region::{Domain, Pd, Region};
use crate::sys::{
    self, Work, generated as c, ibv_gid, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr,
    ibv_sge, rdma_cm_id,
};

/// How many requests one doorbell rings for; a longer chain is several calls into the provider.
const BATCH: usize = 32;

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
    // What must outlive it; it is destroyed in `drop`, before these.
    id: Arc<CmId>,
    _completions: Arc<Queue>,
    domain: Arc<Pd>,
}

// SAFETY: work may be posted by any number of threads at once: all verbs objects are safe for multi-threaded access
// (ibv_alloc_td(3)). What changes its state or destroys it is done under the lock of its identifier.
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
            // SAFETY: the queue pair is alive; its number and its context's table are never written again.
            let (number, post_send, post_recv) =
                unsafe { ((*raw.as_ptr()).qp_num, (*verbs).ops.post_send, (*verbs).ops.post_recv) };
            let (Some(post_send), Some(post_recv)) = (post_send, post_recv) else {
                // SAFETY: rdma_destroy_qp(3): the identifier has a queue pair, which nobody uses.
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

    /// Posts a chain that one doorbell takes, the first `MOST` of `requests`.
    #[inline]
    fn post_send_batch<const MOST: usize>(
        &self,
        requests: &[SendRequest<'_, Region>],
    ) -> Result<(), PostError<Error>> {
        let mut elements = [const { MaybeUninit::<ibv_sge>::uninit() }; MOST];
        let mut works = [const { MaybeUninit::<ibv_send_wr>::uninit() }; MOST];
        // Everything below goes through these two pointers, so that the links between the requests stay valid.
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
            let num_sge = c_int::from(element.length != 0);
            // SAFETY: `count` is below MOST, the length of the array.
            let sge = unsafe { elements.add(count) };
            // SAFETY: as above: in bounds, of this type, and not borrowed.
            unsafe { sge.write(element) };
            // SAFETY: as above.
            unsafe { sys::write_send_wr(works.add(count), &work(request), sge, num_sge) };
            if count > 0 {
                // SAFETY: both are in bounds, and the one before was written in the previous round.
                unsafe { (*works.add(count - 1)).next = works.add(count) };
            }
            count += 1;
        }
        if count > 0 {
            let mut bad = works;
            // SAFETY: ibv_post_send(3): a live queue pair, and a chain of `count` requests that ends with a null pointer, with
            // elements inside regions of its domain; of each request all is written that the call reads for its operation. The call copies requests, elements and inline bytes; the device reads
            // other bytes later, from memory that is registered, and refuses should a region be dropped before.
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

    /// As [`QueuePair::post_send_batch`], for receives.
    #[inline]
    fn post_recv_batch<const MOST: usize>(
        &self,
        requests: &[RecvRequest<'_, Region>],
    ) -> Result<(), PostError<Error>> {
        let mut elements = [const { MaybeUninit::<ibv_sge>::uninit() }; MOST];
        let mut works = [const { MaybeUninit::<ibv_recv_wr>::uninit() }; MOST];
        let elements = elements.as_mut_ptr().cast::<ibv_sge>();
        let works = works.as_mut_ptr().cast::<ibv_recv_wr>();
        let mut count = 0;
        let mut fault = None;
        for request in requests.iter().take(MOST) {
            let element = match Region::element(&request.local, &self.domain) {
                Ok(element) => element,
                Err(error) => {
                    fault = Some(error);
                    break;
                }
            };
            let num_sge = c_int::from(element.length != 0);
            // SAFETY: `count` is below MOST, the length of the array.
            let sge = unsafe { elements.add(count) };
            // SAFETY: as above: in bounds, of this type, and not borrowed.
            unsafe { sge.write(element) };
            let wr = ibv_recv_wr { wr_id: request.id, next: ptr::null_mut(), sg_list: sge, num_sge };
            // SAFETY: as above.
            unsafe { works.add(count).write(wr) };
            if count > 0 {
                // SAFETY: both are in bounds, and the one before was written in the previous round.
                unsafe { (*works.add(count - 1)).next = works.add(count) };
            }
            count += 1;
        }
        if count > 0 {
            let mut bad = works;
            // SAFETY: ibv_post_recv(3): as for ibv_post_send above.
            let result = unsafe { (self.post_recv)(self.raw.as_ptr(), works, &raw mut bad) };
            if result != 0 {
                return Err(refused("ibv_post_recv", result, position(works, bad, count)));
            }
        }
        match fault {
            None => Ok(()),
            Some(error) => Err(PostError { posted: count, error }),
        }
    }

    #[inline(never)]
    fn post_send_chain(&self, requests: &[SendRequest<'_, Region>]) -> Result<(), PostError<Error>> {
        in_batches(requests, |batch| self.post_send_batch::<BATCH>(batch))
    }

    #[inline(never)]
    fn post_recv_chain(&self, requests: &[RecvRequest<'_, Region>]) -> Result<(), PostError<Error>> {
        in_batches(requests, |batch| self.post_recv_batch::<BATCH>(batch))
    }

    /// Returns the element of a send request that may be posted.
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

/// Creates the queue pair of `id` and says how many bytes it takes inline.
///
/// # Safety
/// The identifier is alive and its lock is held; it, the domain and the queue are of one device.
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
    // SAFETY: rdma_create_qp(3): everything is alive and of one device; both queues are given, so the library makes none of
    // its own; `attributes` is a live structure, into which it writes what was granted.
    let result = unsafe { (domain.device().api.rdma_create_qp)(id, domain.as_ptr(), &raw mut attributes) };
    if result == 0 {
        Ok(attributes.cap.max_inline_data as usize)
    } else {
        Err(Error::last("rdma_create_qp", Stage::Connection))
    }
}

/// Returns the operation of a request and its remote side.
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

/// Returns the bytes of a GID, in network order.
fn gid_bytes(gid: &ibv_gid) -> [u8; 16] {
    const { assert!(size_of::<ibv_gid>() == 16) };
    // SAFETY: a GID is 16 bytes in whichever arm of the union it was written, without padding, and any are a valid array.
    unsafe { ptr::from_ref(gid).cast::<[u8; 16]>().read() }
}

/// Returns the error of `call`, which posted so many requests.
#[cold]
const fn refused(call: &'static str, result: c_int, posted: usize) -> PostError<Error> {
    PostError { posted, error: Error::returned(call, result, Stage::Post) }
}

/// Returns the number of requests of the chain at `first` before the one that was refused.
#[cold]
fn position<T>(first: *const T, bad: *const T, count: usize) -> usize {
    let distance = (bad as usize).wrapping_sub(first as usize) / size_of::<T>();
    // A provider that names none of the chain is taken to have posted nothing: repeating a request is visible, losing one
    // is not.
    if distance < count { distance } else { 0 }
}

impl backend::QueuePair<Verbs> for QueuePair {
    fn number(&self) -> u32 {
        self.number
    }

    fn max_inline(&self) -> usize {
        self.max_inline
    }

    #[inline]
    fn post_send(&self, requests: &[SendRequest<'_, Region>]) -> Result<(), PostError<Error>> {
        // Most chains are of one, which needs no table on the stack.
        match requests {
            [_] => self.post_send_batch::<1>(requests),
            _ => self.post_send_chain(requests),
        }
    }

    #[inline]
    fn post_recv(&self, requests: &[RecvRequest<'_, Region>]) -> Result<(), PostError<Error>> {
        // Most chains are of one, which needs no table on the stack.
        match requests {
            [_] => self.post_recv_batch::<1>(requests),
            _ => self.post_recv_chain(requests),
        }
    }

    fn set_min_rnr_timer(&self, timer: RnrTimer) -> Result<(), Error> {
        let mut attributes: ibv_qp_attr = sys::zeroed();
        attributes.min_rnr_timer = timer.code();
        // Without IBV_QP_STATE the queue pair stays in its state; the timer may be changed in RTS, and nowhere else alone.
        let result = self.id.with(|_| {
            // SAFETY: ibv_modify_qp(3): a live queue pair, and attributes of which only the one in the mask is read.
            unsafe {
                (self.domain.device().api.ibv_modify_qp)(
                    self.raw.as_ptr(),
                    &raw mut attributes,
                    c::IBV_QP_MIN_RNR_TIMER as c_int,
                )
            }
        });
        match result {
            0 => Ok(()),
            result => Err(Error::returned("ibv_modify_qp", result, Stage::Connection)),
        }
    }

    fn is_loopback(&self) -> Result<bool, Error> {
        let attributes = self.path()?;
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
}

impl QueuePair {
    /// Returns the address vector and the state of the queue pair.
    fn path(&self) -> Result<ibv_qp_attr, Error> {
        let mut attributes: ibv_qp_attr = sys::zeroed();
        let mut init: ibv_qp_init_attr = sys::zeroed();
        let mask = (c::IBV_QP_STATE | c::IBV_QP_AV) as c_int;
        let result = self.id.with(|_| {
            // SAFETY: ibv_query_qp(3): a live queue pair, and two live structures of the right types for the answer.
            unsafe {
                (self.domain.device().api.ibv_query_qp)(
                    self.raw.as_ptr(),
                    &raw mut attributes,
                    mask,
                    &raw mut init,
                )
            }
        });
        match result {
            0 => Ok(attributes),
            result => Err(Error::returned("ibv_query_qp", result, Stage::Connection)),
        }
    }
}

/// Posts a chain of any length; `post` takes what one doorbell does.
fn in_batches<T>(
    requests: &[T],
    mut post: impl FnMut(&[T]) -> Result<(), PostError<Error>>,
) -> Result<(), PostError<Error>> {
    let mut posted = 0;
    for batch in requests.chunks(BATCH) {
        post(batch).map_err(|error| PostError { posted: posted + error.posted, error: error.error })?;
        posted += batch.len();
    }
    Ok(())
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // Another may soon lie at its address.
        asynchronous::set_pair(self.id.key(), ptr::null(), ptr::null());
        self.id.with(|id| {
            // SAFETY: rdma_destroy_qp(3): the identifier's queue pair is this one, since it had none when this was created and
            // gets no second; nobody else has the pointer. The lock keeps the event loop from using it meanwhile.
            unsafe { (self.domain.device().api.rdma_destroy_qp)(id) };
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_refused_request_is_found_by_its_address() {
        let chain = [0_u64; 8];
        for index in 0..chain.len() {
            assert_eq!(position(chain.as_ptr(), &raw const chain[index], chain.len()), index);
        }
        assert_eq!(position(chain.as_ptr(), ptr::null(), chain.len()), 0);
        assert_eq!(position(chain.as_ptr(), chain.as_ptr().wrapping_add(8), chain.len()), 0);
        assert_eq!(position(chain.as_ptr(), chain.as_ptr().wrapping_sub(1), chain.len()), 0);
    }

    #[test]
    fn long_chains_go_out_in_batches_and_count_what_was_posted() {
        let requests = [(); 2 * BATCH + 5];
        let mut calls = Vec::new();
        assert!(
            in_batches(&requests, |batch| {
                calls.push(batch.len());
                Ok(())
            })
            .is_ok()
        );
        assert_eq!(calls, [BATCH, BATCH, 5]);

        let mut left = 2;
        let error = in_batches(&requests, |_| {
            left -= 1;
            if left > 0 { Ok(()) } else { Err(PostError { posted: 3, error: Error::Argument("full") }) }
        })
        .unwrap_err();
        assert_eq!(error.posted, BATCH + 3);
    }
}
