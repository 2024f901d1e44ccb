//! The completion queue and its completion channel.

use core::ffi::{c_int, c_void};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::Arc;

use rdma_backend::{Completed, Completion, CompletionError, CompletionStatus, Immediate};

use crate::device::Device;
use crate::error::{Error, Stage, errno};
use crate::sys::{self, generated as c, ibv_comp_channel, ibv_cq, ibv_wc};
use crate::{Verbs, set_nonblocking};

type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
type ReqNotifyCq = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;

/// A completion queue, `ibv_create_cq(3)`, with a completion channel of its own. Its descriptor is
/// readable when [`take_events`](rdma_backend::CompletionQueue::take_events) has an event.
#[derive(Debug)]
pub struct CompletionQueue {
    pub(crate) inner: Arc<Queue>,
}

/// The queue proper, which queue pairs hold: `ibv_destroy_cq(3)` fails while one uses it.
#[derive(Debug)]
pub(crate) struct Queue {
    raw: NonNull<ibv_cq>,
    poll_cq: PollCq,
    req_notify_cq: ReqNotifyCq,
    /// Upper bound on pending events: each call of `ibv_req_notify_cq(3)` yields at most one.
    asked: AtomicU32,
    // Dropped in this order: the queue itself in `drop`, its channel, the device.
    channel: CompletionChannel,
}

// SAFETY: any number of threads may poll, arm and acknowledge at once: verbs objects are safe for
// multi-threaded access (ibv_alloc_td(3)). The last reference destroys it.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

#[derive(Debug)]
struct CompletionChannel {
    raw: NonNull<ibv_comp_channel>,
    fd: RawFd,
    device: Device,
}

impl CompletionChannel {
    fn create(device: Device) -> Result<Self, Error> {
        // SAFETY: ibv_create_comp_channel(3): the context is open while the device is held.
        let raw = unsafe { (device.api.ibv_create_comp_channel)(device.context()) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last("ibv_create_comp_channel", Stage::Create))?;
        // SAFETY: just created; the field is never written again.
        let fd = unsafe { (*raw.as_ptr()).fd };
        let channel = Self { raw, fd, device };
        rdma_process::close_in_children(fd);
        set_nonblocking(fd)?;
        Ok(channel)
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        if rdma_process::is_child() {
            return;
        }
        rdma_process::forget(self.fd);
        // SAFETY: ibv_destroy_comp_channel(3): no other pointer to it exists. It fails with EBUSY,
        // and the channel stays, if the queue could not be destroyed.
        let _busy = unsafe { (self.device.api.ibv_destroy_comp_channel)(self.raw.as_ptr()) };
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if rdma_process::is_child() {
            return;
        }
        // SAFETY: ibv_destroy_cq(3): its queue pairs held it and are destroyed; all its events are
        // acknowledged, so the call does not wait. If it fails, the queue and its channel stay.
        let _busy = unsafe { (self.channel.device.api.ibv_destroy_cq)(self.raw.as_ptr()) };
    }
}

impl Queue {
    pub(crate) const fn as_ptr(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }

    pub(crate) const fn device(&self) -> &Device {
        &self.channel.device
    }
}

/// Room for completions, as C writes them.
///
/// Before a poll there are zeros in the places, where providers do not write what the man page
/// promises of a failure. `vendor_err`: qedr and ocrdma never do, bnxt_re not of a request that it
/// flushes itself, mlx5 not of a length that it finds wrong. `qp_num`: ocrdma not of a request that
/// it flushes itself; 0 is the number of no connected queue pair.
pub struct Batch {
    places: Box<[ibv_wc]>,
    /// How many of them the last poll may have written.
    written: usize,
}

impl Batch {
    fn new(most: usize) -> Self {
        let most = most.min(c_int::MAX as usize);
        Self { places: (0..most).map(|_| sys::zeroed()).collect(), written: 0 }
    }

    /// Takes the completions that `poll` writes.
    ///
    /// # Safety
    /// `poll` takes a number and as many places, writes integers to the first of them as
    /// `ibv_poll_cq(3)` does and returns how many these are, or a negative number.
    #[inline]
    unsafe fn take(&mut self, poll: impl FnOnce(c_int, *mut ibv_wc) -> c_int) -> Result<&[ibv_wc], Error> {
        for place in self.places.iter_mut().take(self.written) {
            (place.vendor_err, place.qp_num) = (0, 0);
        }
        self.written = self.places.len();
        let count = poll(self.places.len() as c_int, self.places.as_mut_ptr());
        let Ok(taken) = usize::try_from(count) else {
            return Err(Error::Poll { code: count });
        };
        // A provider returns no more than it was asked for.
        let Some(told) = self.places.get(..taken) else {
            let text = "the device's provider returns more completions than there is room for";
            return Err(Error::State(text));
        };
        self.written = taken;
        Ok(told)
    }
}

impl CompletionQueue {
    pub(crate) fn create(device: Device, depth: u32, vector: u32) -> Result<Self, Error> {
        let Ok(depth) = c_int::try_from(depth.max(1)) else {
            return Err(Error::Argument("the depth of a completion queue is too large"));
        };
        let vector = (vector % device.completion_vectors()) as c_int;
        let channel = CompletionChannel::create(device)?;
        let device = &channel.device;
        // SAFETY: ibv_create_cq(3): an open context, a channel on it, and no context pointer.
        let raw = unsafe {
            (device.api.ibv_create_cq)(device.context(), depth, ptr::null_mut(), channel.raw.as_ptr(), vector)
        };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last("ibv_create_cq", Stage::Create))?;
        // SAFETY: the context is open; its table is never written after opening.
        let (poll_cq, req_notify_cq) =
            unsafe { ((*device.context()).ops.poll_cq, (*device.context()).ops.req_notify_cq) };
        let (Some(poll_cq), Some(req_notify_cq)) = (poll_cq, req_notify_cq) else {
            // SAFETY: just created, used by nothing.
            unsafe { (device.api.ibv_destroy_cq)(raw.as_ptr()) };
            return Err(Error::State("the device's provider cannot poll or arm completion queues"));
        };
        Ok(Self { inner: Arc::new(Queue { raw, poll_cq, req_notify_cq, asked: AtomicU32::new(0), channel }) })
    }
}

impl rdma_backend::CompletionQueue<Verbs> for CompletionQueue {
    type Batch = Batch;

    fn batch(most: usize) -> Batch {
        Batch::new(most)
    }

    #[inline]
    fn poll_batch<'a>(
        &self,
        batch: &'a mut Batch,
    ) -> Result<impl ExactSizeIterator<Item = Completion> + Clone + use<'a>, Error> {
        Error::unless_forked()?;
        let queue = &*self.inner;
        // SAFETY: ibv_poll_cq(3): a live queue, and places for as many completions as are asked
        // for, of which it writes the first and returns their number.
        let taken = unsafe { batch.take(|most, places| (queue.poll_cq)(queue.as_ptr(), most, places)) }?;
        Ok(taken.iter().map(convert))
    }

    #[inline]
    fn arm(&self) -> Result<(), Error> {
        Error::unless_forked()?;
        let queue = &*self.inner;
        queue.asked.fetch_add(1, Relaxed);
        // SAFETY: ibv_req_notify_cq(3): a live queue; 0: not only solicited completions.
        match unsafe { (queue.req_notify_cq)(queue.as_ptr(), 0) } {
            0 => Ok(()),
            result => Err(Error::returned("ibv_req_notify_cq", result, Stage::Complete)),
        }
    }

    #[inline]
    fn take_events(&self) -> Result<u32, Error> {
        Error::unless_forked()?;
        let queue = &*self.inner;
        let api = queue.channel.device.api;
        let mut taken = 0;
        // Saves a system call if no more events can have arrived.
        let asked = queue.asked.load(Relaxed).max(1);
        let cause = loop {
            if taken == asked {
                break libc::EAGAIN;
            }
            let mut cq: *mut ibv_cq = ptr::null_mut();
            let mut context: *mut c_void = ptr::null_mut();
            // SAFETY: ibv_get_cq_event(3): a live channel with a non-blocking descriptor, and two
            // live pointers. The channel serves this queue only, so the event is for it.
            let result =
                unsafe { (api.ibv_get_cq_event)(queue.channel.raw.as_ptr(), &raw mut cq, &raw mut context) };
            if result == 0 {
                taken += 1;
                continue;
            }
            match errno() {
                libc::EINTR => {}
                cause => break cause,
            }
        };
        if taken > 0 {
            // A device may raise more events than were asked for. If the store forgets a request
            // that another thread makes meanwhile, its event is left to the next call.
            if queue.asked.fetch_sub(taken, Relaxed) < taken {
                queue.asked.store(0, Relaxed);
            }
            // SAFETY: ibv_ack_cq_events(3): exactly the events that this call took.
            unsafe { (api.ibv_ack_cq_events)(queue.as_ptr(), taken) };
        }
        if cause == libc::EAGAIN || taken > 0 {
            Ok(taken)
        } else {
            Err(Error::Call { call: "ibv_get_cq_event", errno: cause, stage: Stage::Complete })
        }
    }
}

impl AsFd for CompletionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open until the channel is destroyed, after the borrow.
        unsafe { BorrowedFd::borrow_raw(self.inner.channel.fd) }
    }
}

/// Tells a completion in the seam's terms. Providers leave meaningless fields as they were (mlx5:
/// `byte_len` and `imm_data` of a SEND or WRITE), so each is read only where it has a meaning.
#[inline]
fn convert(wc: &ibv_wc) -> Completion {
    // Fast path: nearly all completions are of this kind.
    let announces = wc.status == c::IBV_WC_SUCCESS && wc.opcode == c::IBV_WC_RECV_RDMA_WITH_IMM;
    let result = match immediate(wc) {
        Some(immediate) if announces => Ok(Completed::RecvWrite { immediate }),
        _ => other(wc),
    };
    Completion { id: wc.wr_id, queue_pair: wc.qp_num, result }
}

/// Returns the immediate of a receive, if it came with one.
#[inline]
fn immediate(wc: &ibv_wc) -> Option<Immediate> {
    let carries = wc.wc_flags & c::IBV_WC_WITH_IMM != 0;
    // SAFETY: a place inside a live structure, which is an integer in either arm of its union.
    carries.then(|| Immediate(u32::from_be(unsafe { sys::wc_immediate(wc).read() })))
}

/// Returns a failure, or a success that is not a WRITE with immediate.
#[cold]
fn other(wc: &ibv_wc) -> Result<Completed, CompletionError> {
    let failed = |status, vendor| Err(CompletionError { status: CompletionStatus(status), vendor });
    if wc.status != c::IBV_WC_SUCCESS {
        return failed(wc.status, wc.vendor_err);
    }
    match wc.opcode {
        c::IBV_WC_SEND => Ok(Completed::Send),
        c::IBV_WC_RDMA_WRITE => Ok(Completed::Write),
        c::IBV_WC_RDMA_READ => Ok(Completed::Read),
        c::IBV_WC_RECV => Ok(Completed::Recv { len: wc.byte_len, immediate: immediate(wc) }),
        // Nothing posted here completes as anything else, no WRITE with immediate without one.
        opcode => failed(c::IBV_WC_GENERAL_ERR, opcode),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a completion of which the provider wrote what `write` does, and whom it concerns.
    fn read(status: u32, write: impl FnOnce(&mut ibv_wc)) -> Completion {
        let mut wc: ibv_wc = sys::zeroed();
        (wc.wr_id, wc.qp_num, wc.status) = (7, 17, status);
        write(&mut wc);
        convert(&wc)
    }

    /// A request of the send queue that succeeded, with nothing but its operation.
    fn sent(opcode: u32) -> Completion {
        read(c::IBV_WC_SUCCESS, |to| to.opcode = opcode)
    }

    /// A receive of 32 bytes, with an immediate if the flags say so.
    fn received(opcode: u32, flags: u32) -> Completion {
        read(c::IBV_WC_SUCCESS, |to| {
            (to.opcode, to.byte_len, to.wc_flags) = (opcode, 32, flags);
            // SAFETY: a place inside a live structure.
            unsafe { sys::wc_immediate(&raw mut *to).cast_mut().write(5_u32.to_be()) };
        })
    }

    #[test]
    fn successes_say_what_was_done_and_nothing_else_of_them_is_read() {
        let table = [
            (c::IBV_WC_SEND, Completed::Send),
            (c::IBV_WC_RDMA_WRITE, Completed::Write),
            (c::IBV_WC_RDMA_READ, Completed::Read),
        ];
        for (opcode, completed) in table {
            assert_eq!(sent(opcode), Completion { id: 7, queue_pair: 17, result: Ok(completed) });
        }
        let plain = received(c::IBV_WC_RECV, 0).result;
        assert_eq!(plain, Ok(Completed::Recv { len: 32, immediate: None }));
        let with = received(c::IBV_WC_RECV, c::IBV_WC_WITH_IMM).result;
        assert_eq!(with, Ok(Completed::Recv { len: 32, immediate: Some(Immediate(5)) }));
        let written = received(c::IBV_WC_RECV_RDMA_WITH_IMM, c::IBV_WC_WITH_IMM).result;
        assert_eq!(written, Ok(Completed::RecvWrite { immediate: Immediate(5) }));
    }

    #[test]
    fn an_immediate_without_its_flag_is_not_read() {
        let error = received(c::IBV_WC_RECV_RDMA_WITH_IMM, 0).result.unwrap_err();
        assert_eq!(error.status, CompletionStatus::GENERAL_ERR);
    }

    #[test]
    fn failures_carry_status_and_vendor_code_only() {
        let failed = read(c::IBV_WC_RNR_RETRY_EXC_ERR, |to| to.vendor_err = 99);
        let error = failed.result.unwrap_err();
        assert_eq!(error, CompletionError { status: CompletionStatus::RNR_RETRY_EXC_ERR, vendor: 99 });
    }

    /// Returns what is taken from a provider that answers `count` and writes of each place nothing
    /// but what `write` does: the rest is as it was prepared.
    fn polled(
        batch: &mut Batch,
        count: c_int,
        write: impl Fn(&mut ibv_wc),
    ) -> Result<Vec<Completion>, Error> {
        // SAFETY: as many places as are asked for.
        let taken = unsafe {
            batch.take(|most, places| {
                (0..count.clamp(0, most) as usize).for_each(|at| write(&mut *places.add(at)));
                count
            })
        };
        taken.map(|taken| taken.iter().map(convert).collect())
    }

    /// Returns a provider that writes of a flushed request no more than ocrdma does, which is
    /// least.
    fn flush(wr_id: u64) -> impl Fn(&mut ibv_wc) {
        move |to| (to.wr_id, to.status, to.byte_len) = (wr_id, c::IBV_WC_WR_FLUSH_ERR, 0)
    }

    /// Also where completions that the provider wrote as a whole were before.
    #[test]
    fn what_a_provider_leaves_unwritten_of_a_failure_is_zero() {
        let flushed = CompletionError { status: CompletionStatus::WR_FLUSH_ERR, vendor: 0 };
        for room in [1, 2, 32] {
            let mut batch = Batch::new(room);
            for whole in [0, room, 1, 0] {
                polled(&mut batch, whole as c_int, |to| (to.vendor_err, to.qp_num) = (99, 17)).unwrap();
                let told = polled(&mut batch, room as c_int, flush(7)).unwrap();
                assert_eq!(told, vec![Completion { id: 7, queue_pair: 0, result: Err(flushed) }; room]);
            }
        }
        // As bnxt_re.
        let told = polled(&mut Batch::new(1), 1, |to| {
            flush(7)(to);
            to.qp_num = 17;
        });
        assert_eq!(told.unwrap(), [Completion { id: 7, queue_pair: 17, result: Err(flushed) }]);
    }

    #[test]
    fn fewer_completions_than_there_is_room_for_are_the_first() {
        let mut batch = Batch::new(4);
        assert_eq!(polled(&mut batch, 0, flush(7)).unwrap(), []);
        assert_eq!(polled(&mut batch, 3, flush(7)).unwrap().len(), 3);
    }

    #[test]
    fn a_provider_that_cannot_poll_or_exceeds_the_room_is_an_error() {
        let mut batch = Batch::new(4);
        for code in [-1, -2, c_int::MIN] {
            let error = polled(&mut batch, code, flush(7));
            assert!(matches!(error, Err(Error::Poll { code: told }) if told == code));
        }
        assert!(matches!(polled(&mut batch, 5, flush(7)), Err(Error::State(_))));
    }

    #[test]
    fn the_status_numbers_are_those_of_the_header() {
        let table = [
            (CompletionStatus::LOC_LEN_ERR, c::IBV_WC_LOC_LEN_ERR),
            (CompletionStatus::LOC_QP_OP_ERR, c::IBV_WC_LOC_QP_OP_ERR),
            (CompletionStatus::LOC_PROT_ERR, c::IBV_WC_LOC_PROT_ERR),
            (CompletionStatus::WR_FLUSH_ERR, c::IBV_WC_WR_FLUSH_ERR),
            (CompletionStatus::BAD_RESP_ERR, c::IBV_WC_BAD_RESP_ERR),
            (CompletionStatus::LOC_ACCESS_ERR, c::IBV_WC_LOC_ACCESS_ERR),
            (CompletionStatus::REM_INV_REQ_ERR, c::IBV_WC_REM_INV_REQ_ERR),
            (CompletionStatus::REM_ACCESS_ERR, c::IBV_WC_REM_ACCESS_ERR),
            (CompletionStatus::REM_OP_ERR, c::IBV_WC_REM_OP_ERR),
            (CompletionStatus::RETRY_EXC_ERR, c::IBV_WC_RETRY_EXC_ERR),
            (CompletionStatus::RNR_RETRY_EXC_ERR, c::IBV_WC_RNR_RETRY_EXC_ERR),
            (CompletionStatus::REM_ABORT_ERR, c::IBV_WC_REM_ABORT_ERR),
            (CompletionStatus::FATAL_ERR, c::IBV_WC_FATAL_ERR),
            (CompletionStatus::RESP_TIMEOUT_ERR, c::IBV_WC_RESP_TIMEOUT_ERR),
            (CompletionStatus::GENERAL_ERR, c::IBV_WC_GENERAL_ERR),
        ];
        for (ours, header) in table {
            assert_eq!(ours.0, header, "{ours:?}");
        }
    }
}
