//! Bytes in flight between processes, for the threads that move them.

use core::fmt;
use std::sync::Arc;

use crate::driver::Core;
use crate::model::Freight;

/// The bytes of a message with an end in another process ([`ForeignMemory`](crate::ForeignMemory)),
/// in flight from memory to memory.
///
/// They are moved step by step. Each step accesses the memory of one end, and takes as long as that
/// end's process lets it. Dropping a load loses its message.
pub struct Load {
    core: Arc<Core>,
    /// `None` after the end.
    freight: Option<Freight>,
}

impl Load {
    pub(crate) const fn new(core: Arc<Core>, freight: Freight) -> Self {
        Self { core, freight: Some(freight) }
    }

    /// Takes the next step. Do not call it under a lock that others might wait for.
    pub fn step(&mut self) {
        if let Some(freight) = &mut self.freight {
            freight.step();
        }
    }

    /// Continues: the memory that each step accesses takes it, and in the end the message arrives.
    pub fn go(self) {
        let core = Arc::clone(&self.core);
        if let Some(freight) = self.pass() {
            core.arrive(freight);
        }
    }

    /// Takes all steps that run on this thread. Returns the freight if it has arrived.
    pub(crate) fn pass(mut self) -> Option<Freight> {
        loop {
            let freight = self.freight.as_ref()?;
            if freight.is_at_its_end() {
                return self.freight.take();
            }
            match freight.next() {
                // If another thread takes it over, that thread calls `go`.
                Some(memory) => self = memory.carry(self)?,
                None => self.step(),
            }
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // Later messages of its queue pair wait for it, so it must have an end.
        if let Some(freight) = self.freight.take() {
            self.core.lose(&freight);
        }
    }
}

impl fmt::Debug for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Load").finish_non_exhaustive()
    }
}
