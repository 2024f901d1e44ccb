//! Chains of work requests, as C takes them.

use core::ffi::c_int;
use core::mem::MaybeUninit;
use core::ptr;

use rdma_backend::PostError;

use crate::error::{Error, Stage};
use crate::sys::{ibv_recv_wr, ibv_sge};

/// Requests per doorbell; a longer chain is several calls into the provider.
pub(crate) const BATCH: usize = 32;

#[repr(C)]
struct Receive {
    work: ibv_recv_wr,
    element: ibv_sge,
}

/// Hands the first `MOST` of `receives` to `post`: a chain, and the place for the refused request.
#[inline]
pub(crate) fn recv_chain<const MOST: usize>(
    receives: impl Iterator<Item = Result<(u64, ibv_sge), Error>>,
    post: impl FnOnce(*mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
) -> Result<(), PostError<Error>> {
    let mut places = [const { MaybeUninit::<Receive>::uninit() }; MOST];
    let places = places.as_mut_ptr().cast::<Receive>();
    let mut count = 0;
    let mut fault = None;
    for (at, receive) in (0..MOST).zip(receives) {
        let (wr_id, element) = match receive {
            Ok(receive) => receive,
            Err(error) => {
                fault = Some(error);
                break;
            }
        };
        let num_sge = c_int::from(element.length != 0);
        // SAFETY: `at` is below MOST, the array's length: `next` is inside or just behind it.
        let (place, next) = unsafe { (places.add(at), places.add(at + 1)) };
        // SAFETY: a place inside the array; nothing is read.
        let sg_list = unsafe { &raw mut (*place).element };
        let work = ibv_recv_wr { wr_id, next: next.cast(), sg_list, num_sge };
        // SAFETY: as above: in bounds, of this type, and not borrowed.
        unsafe { place.write(Receive { work, element }) };
        count = at + 1;
    }
    if count > 0 {
        // SAFETY: in bounds, and written in the last round.
        unsafe { (*places.add(count - 1)).work.next = ptr::null_mut() };
        // A request is the first field of its place.
        let first = places.cast::<ibv_recv_wr>();
        let mut bad = first;
        let result = post(first, &raw mut bad);
        if result != 0 {
            return Err(refused("ibv_post_recv", result, position(places, bad.cast(), count)));
        }
    }
    match fault {
        None => Ok(()),
        Some(error) => Err(PostError { posted: count, error }),
    }
}

#[cold]
pub(crate) const fn refused(call: &'static str, result: c_int, posted: usize) -> PostError<Error> {
    PostError { posted, error: Error::returned(call, result, Stage::Post) }
}

#[cold]
pub(crate) fn position<T>(first: *const T, bad: *const T, count: usize) -> usize {
    let distance = (bad as usize).wrapping_sub(first as usize) / size_of::<T>();
    // If `bad` is not in the chain, none was posted: better to repeat a request than to lose one.
    if distance < count { distance } else { 0 }
}

/// Posts a chain of any length by calls of `post`, which takes at most BATCH.
#[inline]
pub(crate) fn in_batches<T>(
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

    /// Returns what C finds in a chain of these lengths (0 cannot be posted), and the outcome.
    fn received(lengths: &[u32], result: c_int, refuses: usize) -> (Vec<u32>, Result<(), PostError<Error>>) {
        let receives = lengths.iter().zip(100..).map(|(length, id)| match length {
            0 => Err(Error::Argument("outside")),
            &length => Ok((id, ibv_sge { addr: id, length, lkey: 3 })),
        });
        let mut found = Vec::new();
        let outcome = recv_chain::<4>(receives, |first, bad| {
            let mut at = first;
            while !at.is_null() {
                // SAFETY: ibv_post_recv(3): each request points to its element and the next.
                unsafe {
                    let element = &*(*at).sg_list;
                    assert_eq!(((*at).wr_id, (*at).num_sge, element.lkey), (element.addr, 1, 3));
                    if found.len() == refuses {
                        *bad = at;
                    }
                    found.push(element.length);
                    at = (*at).next;
                }
            }
            result
        });
        (found, outcome)
    }

    #[test]
    fn receives_are_linked_up_to_the_first_that_cannot_be_posted() {
        let (found, outcome) = received(&[1, 2, 3, 4, 5], 0, usize::MAX);
        assert_eq!(found, [1, 2, 3, 4], "as many as the chain has places");
        assert!(outcome.is_ok());
        let (found, outcome) = received(&[1, 2, 0, 4], 0, usize::MAX);
        assert_eq!((found.len(), outcome.unwrap_err().posted), (2, 2));
        let (found, outcome) = received(&[0, 2], 0, usize::MAX);
        assert_eq!((found.len(), outcome.unwrap_err().posted), (0, 0), "C is not called");
        for refuses in 0..4 {
            let (found, outcome) = received(&[1; 4], libc::ENOMEM, refuses);
            assert_eq!((found.len(), outcome.unwrap_err().posted), (4, refuses));
        }
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
