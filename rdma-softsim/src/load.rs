//! Bytes on their way between processes, for those who move them.

use core::fmt;
use std::sync::Arc;

use crate::driver::Core;
use crate::model::Freight;

/// The bytes of a message with an end in another process ([`ForeignMemory`](crate::ForeignMemory)), on their way from memory to memory.
///
/// They are moved step by step. Each step reaches into the memory of one end, and takes as long as that end's process lets it. A load that
/// is dropped on its way is a message that is lost.
pub struct Load {
    core: Arc<Core>,
    /// Taken at the end.
    freight: Option<Freight>,
}

impl Load {
    pub(crate) const fn new(core: Arc<Core>, freight: Freight) -> Self {
        Self { core, freight: Some(freight) }
    }

    /// Takes the next step. Not under any lock that somebody else might wait for.
    pub fn step(&mut self) {
        if let Some(freight) = &mut self.freight {
            freight.step();
        }
    }

    /// Goes on: each step is taken by the memory that it reaches into, and in the end the message arrives.
    pub fn go(self) {
        let core = Arc::clone(&self.core);
        if let Some(freight) = self.pass() {
            core.arrive(freight);
        }
    }

    /// Takes all steps that are taken in this thread. Returns what has come to its end.
    pub(crate) fn pass(mut self) -> Option<Freight> {
        loop {
            let freight = self.freight.as_ref()?;
            if freight.is_at_its_end() {
                return self.freight.take();
            }
            match freight.next() {
                Some(memory) => self = memory.carry(self)?,
                None => self.step(),
            }
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
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
