//! The program's end of a completion queue's page: polling and arming without a system call.

use core::ffi::c_int;
use core::ptr::{self, NonNull};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;

use softrdma_wire::{ARMS, Completion, Name, Notice, PAGE, POLLS, POSTS_AT, Page, Posts, Request};

use crate::layout::IBV_WC_RECV;
use crate::link::{ask, link};
use crate::process::generation;
use crate::room::Room;

/// How many empty polls in a row are made before the thread yields the processor and checks that
/// the fabric is alive.
const IDLE: u32 = 64;

/// The queue of a queue pair that a completion is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Side {
    Send,
    Receive,
}

/// A queue's page, and the program's position in it.
pub(crate) struct Ring {
    page: NonNull<Page>,
    queue: Name,
    /// How many completions were taken. The page counts without the upper half.
    taken: u64,
    /// How many polls in a row found nothing.
    idle: u32,
    /// How many work requests certainly find room ([`Pair::room`], [`Pair::send_room`]), by the
    /// queue pairs' numbers, and the position from which on completions with that number are the
    /// queue pair's.
    ///
    /// [`Pair::room`]: crate::pair::Pair::room
    /// [`Pair::send_room`]: crate::pair::Pair::send_room
    rooms: BTreeMap<(u32, Side), (u64, Arc<Room>)>,
    /// The process that made it, by its generation. A child has another, and no access to its
    /// parent's queues.
    generation: u32,
}

// SAFETY: the page consists of atomics, and stays mapped as long as this exists.
unsafe impl Send for Ring {}

impl Ring {
    /// Maps the page of a new queue: page `number` of the memory.
    pub(crate) fn map(queue: Name, number: u32, memory: &OwnedFd) -> Result<Self, c_int> {
        let page = map(number as usize * PAGE, PAGE, memory)?.cast();
        let rooms = BTreeMap::new();
        Ok(Self { page, queue, taken: 0, idle: 0, rooms, generation: generation() })
    }

    /// From now on, each work request on this side of the queue pair with this number that the
    /// program takes the completion of gives its place back to `room`.
    ///
    /// The queue pair has no work requests yet. Completions that are in the queue already are of a
    /// former life, or of another queue pair that had the number. If some of them are not shown, it
    /// is not known where they end, and no place is given back.
    pub(crate) fn follow(&mut self, number: u32, side: Side, room: &Arc<Room>) {
        if let Ok(page) = self.page()
            && page.calls() & POLLS == 0
        {
            let before = page.shown().wrapping_sub(self.taken as u32);
            self.rooms.insert((number, side), (self.taken + u64::from(before), Arc::clone(room)));
        }
    }

    /// Ends what [`Ring::follow`] has begun.
    pub(crate) fn forget(&mut self, number: u32, side: Side) {
        self.rooms.remove(&(number, side));
    }

    fn page(&self) -> Result<&Page, c_int> {
        if self.generation != generation() {
            return Err(libc::EINVAL);
        }
        // SAFETY: mapped by `map`, as long as this exists. The page is made of atomics, for which
        // any bytes are valid, and which the fabric may write meanwhile.
        Ok(unsafe { self.page.as_ref() })
    }

    /// Passes at most `most` completions to `give`. Fewer mean that the queue was empty
    /// (`ibv_poll_cq(3)`).
    ///
    /// # Errors
    /// Reported only if no completion was passed.
    pub(crate) fn poll(&mut self, most: usize, mut give: impl FnMut(Completion)) -> Result<usize, c_int> {
        let (queue, taken, mut idle) = (self.queue, self.taken, self.idle);
        let (page, rooms, mut position) = (self.page()?, &self.rooms, taken);
        let mut freed = Vec::new();
        let mut give = |completion: Completion| {
            let side = if completion.opcode & IBV_WC_RECV == 0 { Side::Send } else { Side::Receive };
            if completion.status == 0
                && let Some((from, room)) = rooms.get(&(completion.pair, side))
                && position >= *from
            {
                freed.push((room, room.number()));
            }
            position += 1;
            give(completion);
        };
        let take = || take_shown(page, taken as u32, most, || ask(&Request::Poll(queue)), &mut give);
        let pause = || {
            link()?.is_alive()?;
            std::thread::yield_now();
            Ok(())
        };
        let count = take_or_pause(&mut idle, take, pause);
        // Only now does the page say that they are taken, which makes room for sends.
        for (room, number) in freed {
            room.give_back(number);
        }
        self.idle = idle;
        let count = count?;
        self.taken = taken + count as u64;
        Ok(count)
    }

    /// `ibv_req_notify_cq(3)`.
    pub(crate) fn arm(&self, solicited: bool) -> Result<(), c_int> {
        let page = self.page()?;
        page.arm(self.taken as u32, solicited);
        // The fabric shows what found no room before, says if the queue is lost, or raises an event
        // by a fault.
        if page.calls() & (ARMS | POLLS) != 0 { ask(&Request::Poll(self.queue)) } else { Ok(()) }
    }
}

/// Maps a part of the memory that the fabric shares with this process.
fn map(at: usize, len: usize, memory: &OwnedFd) -> Result<NonNull<libc::c_void>, c_int> {
    let offset = libc::off_t::try_from(at).map_err(|_| libc::EINVAL)?;
    let (access, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: mmap(2): a new mapping at a place that the kernel chooses.
    let page = unsafe { libc::mmap(ptr::null_mut(), len, access, shared, memory.as_raw_fd(), offset) };
    let page = if page == libc::MAP_FAILED { None } else { NonNull::new(page) };
    page.ok_or(libc::ENOMEM)
}

/// Maps the fabric's notices to this process. They stay mapped.
pub(crate) fn notice(memory: &OwnedFd) -> Result<&'static Notice, c_int> {
    // SAFETY: just mapped, and never unmapped. The page is made of atomics, for which any bytes are
    // valid, and which the fabric may write meanwhile.
    Ok(unsafe { map(0, PAGE, memory)?.cast::<Notice>().as_ref() })
}

/// Maps the ring of this process's posts. It stays mapped.
pub(crate) fn posts(memory: &OwnedFd) -> Result<&'static Posts, c_int> {
    // SAFETY: as above.
    Ok(unsafe { map(POSTS_AT, size_of::<Posts>(), memory)?.cast::<Posts>().as_ref() })
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: munmap(2): what `map` mapped, which no reference borrows any more.
        let _unmapped = unsafe { libc::munmap(self.page.as_ptr().cast(), PAGE) };
    }
}

/// Takes what is there. After [`IDLE`] times in a row that nothing was, pauses and looks again.
///
/// Others run in the pause: without the second look, a program that looks at its events after each
/// empty poll often finds a disconnection before the completion that preceded it.
fn take_or_pause(
    idle: &mut u32,
    mut take: impl FnMut() -> Result<usize, c_int>,
    pause: impl FnOnce() -> Result<(), c_int>,
) -> Result<usize, c_int> {
    let count = take()?;
    *idle = if count > 0 { 0 } else { *idle + 1 };
    if *idle < IDLE {
        return Ok(count);
    }
    *idle = 0;
    pause()?;
    take()
}

/// Takes at most `most` completions from a page of which `taken` were taken before.
///
/// `call` asks the fabric to show more, if the page says that there are more.
fn take_shown(
    page: &Page,
    taken: u32,
    most: usize,
    call: impl Fn() -> Result<(), c_int>,
    mut give: impl FnMut(Completion),
) -> Result<usize, c_int> {
    let mut count = 0;
    while count < most {
        let position = taken.wrapping_add(count as u32);
        let completion = match page.at(position) {
            None if page.calls() & POLLS != 0 => {
                page.give_back(position);
                match call() {
                    Ok(()) => page.at(position),
                    // The next poll meets the error again.
                    Err(_) if count > 0 => None,
                    Err(errno) => return Err(errno),
                }
            }
            found => found,
        };
        let Some(completion) = completion else { break };
        give(completion);
        count += 1;
    }
    if count > 0 {
        page.give_back(taken.wrapping_add(count as u32));
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use softrdma_wire::SHOWN;

    use super::*;

    /// A fabric that has completions with these ids, and shows a limited number at a time.
    struct Fabric {
        page: Box<Page>,
        shown: Cell<u32>,
        waiting: RefCell<Vec<u64>>,
        calls: Cell<u32>,
    }

    impl Fabric {
        fn new(ids: core::ops::Range<u64>) -> Self {
            let waiting = RefCell::new(ids.rev().collect());
            let fabric = Self { page: Box::default(), shown: Cell::new(0), waiting, calls: Cell::new(0) };
            fabric.show();
            fabric
        }

        fn show(&self) {
            let mut waiting = self.waiting.borrow_mut();
            while self.shown.get().wrapping_sub(self.page.taken()) < SHOWN
                && let Some(id) = waiting.pop()
            {
                let (pair, status, vendor, opcode, len) = (1, 0, 0, 0, 0);
                let (immediate, source) = (None, None);
                let completion = Completion { id, pair, status, vendor, opcode, len, immediate, source };
                self.page.show(self.shown.get(), &completion);
                self.shown.set(self.shown.get() + 1);
            }
            self.page.set_calls(if waiting.is_empty() { 0 } else { POLLS });
        }

        /// Polls for `most` completions after the first `taken`.
        fn poll(&self, taken: u32, most: usize) -> Vec<u64> {
            let mut given = Vec::new();
            let call = || {
                self.calls.set(self.calls.get() + 1);
                self.show();
                Ok(())
            };
            let count = take_shown(&self.page, taken, most, call, |completion| given.push(completion.id));
            assert_eq!(count, Ok(given.len()));
            given
        }
    }

    #[test]
    fn fewer_than_asked_mean_that_the_queue_is_empty() {
        let all = u64::from(3 * SHOWN + 5);
        let fabric = Fabric::new(0..all);
        assert_eq!(fabric.poll(0, 3), [0, 1, 2]);
        assert_eq!((fabric.poll(3, 0), fabric.calls.get()), (vec![], 0));
        assert_eq!(fabric.poll(3, 1000), (3..all).collect::<Vec<_>>());
        // It asks once each time that there was more, and never when nothing is left.
        assert_eq!((fabric.calls.get(), fabric.poll(all as u32, 8), fabric.calls.get()), (3, vec![], 3));
    }

    #[test]
    fn what_came_in_a_pause_is_found() {
        let fabric = Fabric::new(0..0);
        let mut idle = 0;
        let poll = |idle: &mut u32, came: &[u64]| {
            let (mut given, mut paused) = (Vec::new(), false);
            let take = || take_shown(&fabric.page, 0, 8, || Ok(()), |completion| given.push(completion.id));
            let pause = || {
                paused = true;
                fabric.waiting.borrow_mut().extend(came);
                fabric.show();
                Ok(())
            };
            assert!(take_or_pause(idle, take, pause).is_ok());
            (given, paused)
        };
        for _ in 1..IDLE {
            assert_eq!(poll(&mut idle, &[]), (vec![], false));
        }
        assert_eq!(poll(&mut idle, &[7]), (vec![7], true));
        assert_eq!(poll(&mut idle, &[]), (vec![7], false));
    }

    #[test]
    fn an_error_shows_when_no_completion_does() {
        let fabric = Fabric::new(0..2);
        fabric.page.set_calls(POLLS);
        let refused = || Err(libc::EIO);
        assert_eq!(take_shown(&fabric.page, 0, 8, refused, |_| {}), Ok(2));
        assert_eq!(take_shown(&fabric.page, 2, 8, refused, |_| {}), Err(libc::EIO));
    }
}
