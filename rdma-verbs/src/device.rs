//! The device behind an identifier, and what keeps it open.

use core::ptr::NonNull;
use std::sync::{Arc, Mutex};

use rdma_backend::Capabilities;

use crate::error::{Error, Stage};
use crate::identifier::CmId;
use crate::locked;
use crate::sys::{self, Api, PortAttributes, ibv_context, ibv_device_attr, ibv_gid};

/// An open device: what protection domains and completion queues are made on.
///
/// librdmacm opens devices itself and shares one context among all identifiers. It may close the
/// context of a device that was unplugged once no identifier uses it, so objects made on the
/// context must see to it that this does not happen while they exist. Holding an identifier would
/// do, but a domain outlives most connections and would keep the first one half alive. So the
/// device itself is held, through the list of `rdma_get_devices(3)`; the identifier is the
/// fallback.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) api: &'static Api,
    context: NonNull<ibv_context>,
    _keeper: Option<Arc<CmId>>,
}

// SAFETY: a context may be used by any number of threads at once: all verbs objects are safe for
// multi-threaded access (ibv_alloc_td(3)), and nothing in this module writes through the pointer.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Contexts and lists of devices that stay open for the rest of the process. It grows when a device
/// is plugged in.
static KEPT_OPEN: Mutex<KeptOpen> = Mutex::new(KeptOpen { contexts: Vec::new(), lists: Vec::new() });

struct KeptOpen {
    /// The addresses of the contexts, each once.
    contexts: Vec<usize>,
    /// The lists of `rdma_get_devices(3)` they are from. `rdma_free_devices(3)` would give the
    /// devices back.
    lists: Vec<usize>,
}

impl KeptOpen {
    /// Keeps a list for the contexts in it that no other has; whether there are any.
    fn keep(&mut self, list: usize, contexts: impl Iterator<Item = usize>) -> bool {
        let before = self.contexts.len();
        for context in contexts {
            if !self.contexts.contains(&context) {
                self.contexts.push(context);
            }
        }
        let any = self.contexts.len() > before;
        if any {
            self.lists.push(list);
        }
        any
    }
}

impl Device {
    /// Returns the device whose context is `context`, which belongs to `id`.
    pub(crate) fn hold(api: &'static Api, context: NonNull<ibv_context>, id: &Arc<CmId>) -> Self {
        let held = hold(api, context);
        Self { api, context, _keeper: (!held).then(|| Arc::clone(id)) }
    }

    /// Returns the context if it stays open for the rest of the process, so that its events may be
    /// read at any time.
    pub(crate) fn held_for_ever(api: &Api, context: NonNull<ibv_context>) -> Option<NonNull<ibv_context>> {
        hold(api, context).then_some(context)
    }

    /// Returns the context, open for as long as this device is held.
    pub(crate) const fn context(&self) -> *mut ibv_context {
        self.context.as_ptr()
    }

    /// Returns the number of completion vectors of the device, at least one.
    pub(crate) fn completion_vectors(&self) -> u32 {
        // SAFETY: the context is open; the field is set when it is opened and never written again.
        let vectors = unsafe { (*self.context.as_ptr()).num_comp_vectors };
        u32::try_from(vectors).unwrap_or(1).max(1)
    }

    /// Returns the limits of the device.
    pub(crate) fn capabilities(&self) -> Result<Capabilities, Error> {
        let mut attributes: ibv_device_attr = sys::zeroed();
        // SAFETY: ibv_query_device(3): the context is open and `attributes` is a live structure of
        // the right type.
        let result = unsafe { (self.api.ibv_query_device)(self.context.as_ptr(), &raw mut attributes) };
        if result != 0 {
            return Err(Error::returned("ibv_query_device", result, Stage::Create));
        }
        let positive = |value: i32| u32::try_from(value).unwrap_or(0);
        Ok(Capabilities::new(
            positive(attributes.max_qp_wr),
            positive(attributes.max_cqe),
            attributes.max_mr_size,
            attributes.max_qp_init_rd_atom.clamp(0, 255) as u8,
            self.completion_vectors(),
        ))
    }
}

impl Device {
    /// Returns the GID at `index` of a port's table.
    pub(crate) fn gid(&self, port: u8, index: u8) -> Result<ibv_gid, Error> {
        let mut gid: ibv_gid = sys::zeroed();
        // SAFETY: ibv_query_gid(3): the context is open and `gid` is a live union of the right
        // type; a port or an index that the device does not have is an error.
        let result =
            unsafe { (self.api.ibv_query_gid)(self.context.as_ptr(), port, index.into(), &raw mut gid) };
        match result {
            0 => Ok(gid),
            // -1 with errno, as the man page has it, or the number itself.
            -1 => Err(Error::last("ibv_query_gid", Stage::Connection)),
            result => Err(Error::returned("ibv_query_gid", result, Stage::Connection)),
        }
    }

    /// Returns a port's local identifier; 0 on Ethernet.
    pub(crate) fn lid(&self, port: u8) -> Result<u16, Error> {
        let mut attributes: PortAttributes = sys::zeroed();
        // SAFETY: ibv_query_port(3): the context is open; the function behind the symbol writes 48
        // bytes, and the structure has 64 with the alignment of C's.
        let result =
            unsafe { (self.api.ibv_query_port)(self.context.as_ptr(), port, (&raw mut attributes).cast()) };
        match result {
            0 => Ok(attributes.lid),
            result => Err(Error::returned("ibv_query_port", result, Stage::Connection)),
        }
    }
}

/// Makes librdmacm keep `context` open. Returns whether that succeeded.
fn hold(api: &Api, context: NonNull<ibv_context>) -> bool {
    let mut held = locked(&KEPT_OPEN);
    let wanted = context.as_ptr() as usize;
    if held.contexts.contains(&wanted) {
        return true;
    }
    let mut count = 0;
    // SAFETY: rdma_get_devices(3): the pointer is to a live integer.
    let list = unsafe { (api.rdma_get_devices)(&raw mut count) };
    if list.is_null() {
        return false;
    }
    // SAFETY: the list has `count` entries and a null at its end.
    let contexts = (0..usize::try_from(count).unwrap_or(0)).map(|index| unsafe { *list.add(index) } as usize);
    if !held.keep(list as usize, contexts) {
        // As where the device of `context` is dead: it is in no list. SAFETY: rdma_free_devices(3):
        // the list is from `rdma_get_devices`, given back once. Each context in it stays open by a
        // list that is kept.
        unsafe { (api.rdma_free_devices)(list) };
    }
    held.contexts.contains(&wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_kept_for_the_contexts_that_it_adds() {
        let mut held = KeptOpen { contexts: Vec::new(), lists: Vec::new() };
        assert!(held.keep(0x1, [10, 20].into_iter()));
        assert!(!held.keep(0x2, [20, 10].into_iter()));
        // A device was unplugged.
        assert!(!held.keep(0x3, [20].into_iter()));
        assert!(!held.keep(0x4, [].into_iter()));
        // A device was plugged in.
        assert!(held.keep(0x5, [20, 30].into_iter()));
        assert_eq!((held.contexts, held.lists), (vec![10, 20, 30], vec![0x1, 0x5]));
    }
}
