//! What every part stands on: objects and their ids, time and events, random choices and faults.

pub(super) mod arena;
pub(super) mod environment;
pub(super) mod event;
pub(super) mod event_queue;
pub(super) mod ids;
pub(super) mod seeded;
pub(super) mod target;
