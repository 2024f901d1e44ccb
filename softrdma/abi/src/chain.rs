//! Posts chains of work requests: converts them from C to the wire's form and sends them in
//! batches.

use core::ffi::c_int;
use std::borrow::Cow;

use softrdma_wire::{Local, MAX_INLINE, MAX_WORK, Op, Post, Receive, Reply, Send, Sge};

use crate::handles::destination;
use crate::layout::{
    IBV_QPT_UD, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, IBV_WR_ATOMIC_CMP_AND_SWP,
    IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
    IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, ibv_pd, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_sge,
};
use crate::link::{keep, post};
use crate::pair::{Pair, name};

/// Returns the scatter-gather list of a work request, of at most `most` elements.
///
/// # Safety
/// `list` points to `count` elements.
pub(crate) unsafe fn elements<'a>(
    list: *const ibv_sge,
    count: c_int,
    most: u32,
) -> Result<&'a [ibv_sge], c_int> {
    let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
    if count > most as usize {
        return Err(libc::EINVAL);
    }
    if count == 0 {
        return Ok(&[]);
    }
    // SAFETY: the caller vouches for `count` elements.
    Ok(unsafe { std::slice::from_raw_parts(list, count) })
}

pub(crate) fn on_wire(list: &[ibv_sge]) -> Vec<Sge> {
    list.iter().map(|&ibv_sge { addr: address, length: len, lkey }| Sge { address, len, lkey }).collect()
}

/// Returns the bytes of inline data.
///
/// # Safety
/// The elements name bytes of this process that do not change during `'a`.
unsafe fn inline<'a>(list: &[ibv_sge]) -> Result<Cow<'a, [u8]>, c_int> {
    let total = list.iter().try_fold(0_u32, |sum, element| sum.checked_add(element.length));
    if total.is_none_or(|total| total > MAX_INLINE as u32) {
        return Err(libc::EINVAL);
    }
    let bytes = |element: &ibv_sge| -> &'a [u8] {
        if element.length == 0 {
            return &[];
        }
        let place: *const u8 = std::ptr::with_exposed_provenance(element.addr as usize);
        // SAFETY: the caller vouches for the bytes.
        unsafe { std::slice::from_raw_parts(place, element.length as usize) }
    };
    Ok(match list {
        [] => Cow::Borrowed(&[]),
        [element] => Cow::Borrowed(bytes(element)),
        several => Cow::Owned(several.iter().flat_map(bytes).copied().collect()),
    })
}

/// Converts a send work request to the wire's form.
///
/// # Safety
/// `wr` is as ibv_post_send(3) demands, and its inline bytes do not change during `'a`.
unsafe fn send<'a>(
    wr: &ibv_send_wr,
    most_elements: u32,
    all_signaled: bool,
    datagrams_of: Option<*mut ibv_pd>,
) -> Result<Send<'a>, c_int> {
    // SAFETY: the caller vouches for the list; the unions are of integers and pointers.
    let (list, immediate, rdma, atomic) = unsafe {
        (
            elements(wr.sg_list, wr.num_sge, most_elements)?,
            u32::from_be(wr.__bindgen_anon_1.imm_data),
            wr.wr.rdma,
            wr.wr.atomic,
        )
    };
    let (address, rkey) = (rdma.remote_addr, rdma.rkey);
    let datagram = |pd, immediate| {
        // SAFETY: as above; of such a queue pair this is the variant, whose handle is alive.
        let to = unsafe { destination(wr.wr.ud.ah.cast(), pd, wr.wr.ud.remote_qpn, wr.wr.ud.remote_qkey) };
        to.map(|to| Op::Datagram { to, immediate })
    };
    let op = match (wr.opcode, datagrams_of) {
        (IBV_WR_SEND, Some(pd)) => datagram(pd, None)?,
        (IBV_WR_SEND_WITH_IMM, Some(pd)) => datagram(pd, Some(immediate))?,
        (_, Some(_)) => return Err(libc::EINVAL),
        (IBV_WR_SEND, None) => Op::Send,
        (IBV_WR_SEND_WITH_IMM, None) => Op::SendImmediate(immediate),
        (IBV_WR_RDMA_WRITE, None) => Op::Write { address, rkey },
        (IBV_WR_RDMA_WRITE_WITH_IMM, None) => Op::WriteImmediate { address, rkey, immediate },
        (IBV_WR_RDMA_READ, None) => Op::Read { address, rkey },
        (IBV_WR_ATOMIC_FETCH_AND_ADD, None) => {
            Op::FetchAdd { address: atomic.remote_addr, rkey: atomic.rkey, add: atomic.compare_add }
        }
        (IBV_WR_ATOMIC_CMP_AND_SWP, None) => {
            let (compare, swap) = (atomic.compare_add, atomic.swap);
            Op::CompareSwap { address: atomic.remote_addr, rkey: atomic.rkey, compare, swap }
        }
        _ => return Err(libc::EINVAL),
    };
    let brings = matches!(op, Op::Read { .. } | Op::FetchAdd { .. } | Op::CompareSwap { .. });
    let local = if wr.send_flags & IBV_SEND_INLINE == 0 || brings {
        Local::Memory(on_wire(list))
    } else {
        // SAFETY: ibv_post_send(3): with IBV_SEND_INLINE the elements name bytes of this process,
        // which are read during the call and which no thread changes meanwhile.
        Local::Inline(unsafe { inline(list) }?)
    };
    let signaled = all_signaled || wr.send_flags & IBV_SEND_SIGNALED != 0;
    let solicited = wr.send_flags & IBV_SEND_SOLICITED != 0;
    Ok(Send { id: wr.wr_id, op, signaled, solicited, local })
}

/// Whether the fabric certainly takes these requests once they find room, on a queue pair that
/// takes so many bytes inline.
///
/// It refuses READs and atomics on a connection that was made without them, and datagrams to
/// addresses that are not there.
pub(crate) fn are_certain(work: &[Send<'_>], most_inline: u32) -> bool {
    /// A message has at most 2 GiB.
    const LONGEST: u64 = 1 << 31;
    work.iter().all(|work| {
        let fits = match &work.local {
            Local::Inline(bytes) => bytes.len() <= most_inline as usize,
            Local::Memory(list) => list.iter().map(|part| u64::from(part.len)).sum::<u64>() <= LONGEST,
        };
        let simple =
            matches!(work.op, Op::Send | Op::SendImmediate(_) | Op::Write { .. } | Op::WriteImmediate { .. });
        fits && simple
    })
}

/// Posts a chain in batches: `gather` converts one element, `post` posts a batch and reports how
/// many were taken.
///
/// # Errors
/// The first element that was not posted, and the `errno` for it.
pub(crate) fn chain<T, W>(
    mut next: *mut T,
    successor: impl Fn(*mut T) -> *mut T,
    gather: impl Fn(*mut T) -> Result<W, c_int>,
    post: impl Fn(Vec<W>) -> Result<Reply, c_int>,
) -> Result<(), (*mut T, c_int)> {
    while !next.is_null() {
        let (mut batch, mut places, mut stopped) = (Vec::new(), Vec::new(), None);
        while !next.is_null() && batch.len() < MAX_WORK {
            match gather(next) {
                Ok(work) => batch.push(work),
                Err(errno) => {
                    stopped = Some((next, errno));
                    break;
                }
            }
            places.push(next);
            next = successor(next);
        }
        if let Some(&first) = places.first() {
            match post(batch) {
                Ok(Reply::Posted { errno: 0, .. }) => {}
                Ok(Reply::Posted { count, errno, .. }) => {
                    return Err((places.get(count as usize).copied().unwrap_or(first), errno));
                }
                Ok(_) => return Err((first, libc::EPROTO)),
                Err(errno) => return Err((first, errno)),
            }
        }
        if let Some(refused) = stopped {
            return Err(refused);
        }
    }
    Ok(())
}

/// Reports the result of posting a chain as ibv_post_send(3) does.
///
/// # Safety
/// `bad` points to writable memory for a pointer.
pub(crate) unsafe fn conclude<T>(result: Result<(), (*mut T, c_int)>, bad: *mut *mut T) -> c_int {
    match result {
        Ok(()) => 0,
        Err((refused, errno)) => {
            // SAFETY: the caller vouches for `bad`.
            unsafe { bad.write(refused) };
            errno
        }
    }
}

pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: ibv_post_send(3): a live queue pair, which `create` made as a `Pair`; these fields do
    // not change.
    let (pair, cap, all_signaled, datagrams_of, room) = unsafe {
        let made = qp.cast::<Pair>();
        let datagrams_of = ((*qp).qp_type == IBV_QPT_UD).then_some((*qp).pd);
        (name(qp), (*made).cap, (*made).all_signaled, datagrams_of, &(*made).send_room)
    };
    let posted = chain(
        first,
        // SAFETY: ibv_post_send(3): a list of requests, each linked to the next or to none.
        |wr| unsafe { (*wr).next },
        // SAFETY: as above; inline bytes are sent before this function returns.
        |wr| unsafe { send(&*wr, cap.max_send_sge, all_signaled, datagrams_of) },
        |work| {
            let certain = are_certain(&work, cap.max_inline_data);
            post(pair, room, certain, 0, work, |work| Post::Send { pair, work })
        },
    );
    // SAFETY: ibv_post_send(3): a place for the pointer to the refused request.
    unsafe { conclude(posted, bad) }
}

pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: ibv_post_recv(3): a live queue pair, which `create` made as a `Pair`; these fields do
    // not change.
    let (pair, most, keeps, room) = unsafe {
        let made = qp.cast::<Pair>();
        (name(qp), (*made).cap.max_recv_sge, &(*made).keeps, &*(*made).room)
    };
    let posted = chain(
        first,
        // SAFETY: ibv_post_recv(3): a list of requests, each linked to the next or to none.
        |wr| unsafe { (*wr).next },
        // SAFETY: as above.
        |wr| unsafe {
            Ok(Receive { id: (*wr).wr_id, local: on_wire(elements((*wr).sg_list, (*wr).num_sge, most)?) })
        },
        |mut work| {
            let count = u32::try_from(work.len()).unwrap_or(u32::MAX);
            if keep(pair, keeps, room, &mut work)? {
                return Ok(Reply::Posted { count, errno: 0, room: 0 });
            }
            post(pair, room, true, 0, work, |work| Post::Receive { pair, work })
        },
    );
    // SAFETY: ibv_post_recv(3): a place for the pointer to the refused request.
    unsafe { conclude(posted, bad) }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Posts a chain of `len` requests to a fabric that takes `room` of them and refuses the next
    /// with `errno`. Request number `wrong` cannot be converted.
    ///
    /// Returns the place of the bad request with its errno, and which requests were posted.
    fn posted(
        len: usize,
        wrong: usize,
        room: usize,
        errno: c_int,
    ) -> (Result<(), (usize, c_int)>, Vec<usize>) {
        let mut nodes: Vec<usize> = (0..len).collect();
        let places: Vec<*mut usize> = nodes.iter_mut().map(std::ptr::from_mut).collect();
        let place = |node: *mut usize| places.iter().position(|place| *place == node).expect("of the chain");
        let taken = RefCell::new(Vec::new());
        let result = chain(
            places.first().copied().expect("is not empty"),
            |node| places.get(place(node) + 1).copied().unwrap_or(std::ptr::null_mut()),
            |node| if place(node) == wrong { Err(libc::EINVAL) } else { Ok(place(node)) },
            |work| {
                assert!(work.len() <= MAX_WORK);
                let (mut taken, all) = (taken.borrow_mut(), work.len());
                let count = all.min(room - taken.len());
                taken.extend(work.into_iter().take(count));
                let errno = if count < all { errno } else { 0 };
                Ok(Reply::Posted { count: count as u32, errno, room: 0 })
            },
        );
        (result.map_err(|(bad, errno)| (place(bad), errno)), taken.into_inner())
    }

    #[test]
    fn the_bad_request_is_the_first_that_was_not_posted() {
        const LEN: usize = 3 * MAX_WORK;
        let all = usize::MAX;
        assert_eq!(posted(LEN, all, LEN, 0), (Ok(()), (0..LEN).collect()));
        for bad in [0, 1, 5, MAX_WORK - 1, MAX_WORK, MAX_WORK + 7, LEN - 1] {
            // The fabric refuses the request.
            let expected = (Err((bad, libc::ENOMEM)), (0..bad).collect());
            assert_eq!(posted(LEN, all, bad, libc::ENOMEM), expected);
            // The request is invalid; those before it are posted.
            assert_eq!(posted(LEN, bad, LEN, 0), (Err((bad, libc::EINVAL)), (0..bad).collect()));
        }
        // With both errors in a chain, the fabric's refusal is the earlier one.
        assert_eq!(posted(8, 6, 2, libc::ENOMEM), (Err((2, libc::ENOMEM)), vec![0, 1]));
    }

    #[test]
    fn of_a_message_that_fails_nothing_is_posted() {
        let (mut first, mut second) = (0, 1);
        let (first, second): (*mut i32, *mut i32) = (&raw mut first, &raw mut second);
        let next = |node| if node == first { second } else { std::ptr::null_mut() };
        let failed = |_work: Vec<()>| Err(libc::EIO);
        assert_eq!(chain(first, next, |_| Ok(()), failed), Err((first, libc::EIO)));
    }
}
