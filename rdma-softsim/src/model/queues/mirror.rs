//! Completion queues whose program polls and arms them in memory that it shares with the device,
//! without a call.
//!
//! The model keeps its completions until the program has taken them. It looks at what the program
//! has done before it adds one and once that is shown, and before it needs to know.

use rdma_backend::Completion;

use super::completion::Detail;

/// Memory in which a program finds the completions of its queue.
///
/// The functions are called under the fabric's lock. They must not block and must not call the
/// fabric. What the program writes there is up to it: the model never trusts what it is told of it.
pub trait Mirror: Send + Sync {
    /// Looks at what the program has done since the last call.
    fn look(&self) -> Look;

    /// Shows the program another completion. Returns false if there is no room.
    fn show(&self, completion: &Completion, detail: Detail) -> bool;

    /// Tells the program what it must call the fabric for. It comes after each series of
    /// [`Mirror::show`].
    ///
    /// The next [`Mirror::look`] finds the arming of every program that armed its queue and then
    /// found neither what was shown before nor this.
    fn ask(&self, calls: Calls);
}

/// What a program has done with its completion queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Completions taken before it was armed last.
    pub before: usize,
    /// Whether it was armed, and for what.
    pub armed: Option<Arming>,
    /// Completions taken since.
    pub after: usize,
}

/// The completions that an arming is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arming {
    /// One whose message asked for an event, or a failure.
    Solicited,
    /// Any.
    All,
}

/// What a program must call the fabric for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// A poll that finds nothing: there is more than was shown, or the queue is lost.
    pub polls: bool,
    /// Arming: an event may follow from it at once.
    pub arms: bool,
}
