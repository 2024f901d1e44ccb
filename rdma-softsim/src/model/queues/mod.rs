//! The completion queues of all hosts.

pub(super) mod completion;
pub(super) mod completion_queue;
pub(super) mod mirror;

use super::base::arena::Objects;
use super::base::ids::kind;
use completion_queue::CompletionQueue;

pub(super) type Queues = Objects<kind::Queue, CompletionQueue>;
