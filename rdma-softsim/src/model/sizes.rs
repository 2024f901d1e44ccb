//! The bytes of what queues hold, for [`footprint`](crate::footprint).

use super::base::event::Event;
use super::flights::freight::SMALL_STEP;
use super::flights::{carried, freight};
use super::hosts::context::{AsyncNotice, MOST_NOTICES};
use super::pairs::datagram::{Datagram, MOST_WAITING, MTU};
use super::pairs::ownership::LENT;
use super::pairs::requester::SendWork;
use super::pairs::responder::ReceiveWork;
use super::queues::completion::Entry;

/// A scatter-gather element.
pub(crate) const PART: usize = size_of::<super::regions::parts::Part>();
/// A send without its list and its inline bytes: its work, its message in flight, in a queue that
/// all share, what is known of its buffer, and a buffer for inline bytes.
pub(crate) const SEND: usize = size_of::<SendWork>() + 2 * size_of::<Event>() + LENT + size_of::<Vec<u8>>();
/// A receive without its list.
pub(crate) const RECEIVE: usize = size_of::<ReceiveWork>();
/// A completion.
pub(crate) const COMPLETION: usize = size_of::<Entry>();
/// A datagram that waits for its receiver's memory, without its bytes, and how many may wait. All
/// their bytes together are bounded.
pub(crate) const DATAGRAM: usize = size_of::<Datagram>();
pub(crate) const DATAGRAMS: usize = MOST_WAITING;
/// An asynchronous event, and how many may wait for a program.
pub(crate) const NOTICE: usize = size_of::<AsyncNotice>();
pub(crate) const NOTICES: usize = MOST_NOTICES;
/// The message of a queue pair whose bytes are in flight, and a datagram of its own.
pub(crate) const HELD: usize = 2 * size_of::<super::pairs::queue_pair::QueuePair>()
    + size_of::<carried::Carried>()
    + size_of::<freight::Freight>()
    + SMALL_STEP
    + MTU;
