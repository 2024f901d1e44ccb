//! The device behind an identifier, and what keeps it open.

use core::ptr::{self, NonNull};
use std::sync::{Arc, Mutex};

use rdma_backend::Capabilities;

use crate::error::{Error, Stage};
use crate::identifier::CmId;
use crate::locked;
use crate::sys::{self, Api, PortAttributes, ibv_context, ibv_device_attr, ibv_gid};

/// An open device, on which domains and completion queues are made.
///
/// librdmacm shares one context per device among all identifiers. It may close that of an unplugged
/// device once no identifier uses it, so objects on the context must keep it open. An identifier
/// would, but a domain outlives most connections and would keep the first half alive. So the list
/// of `rdma_get_devices(3)` keeps the device; the identifier is the fallback.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) api: &'static Api,
    context: NonNull<ibv_context>,
    _keeper: Option<Arc<CmId>>,
}

// SAFETY: verbs objects are safe for multi-threaded access (ibv_alloc_td(3)), and nothing in this
// module writes through the pointer.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Contexts and device lists that stay open for the rest of the process.
static KEPT_OPEN: Mutex<KeptOpen> = Mutex::new(KeptOpen { contexts: Vec::new(), lists: Vec::new() });

struct KeptOpen {
    contexts: Vec<usize>,
    /// Theirs, of `rdma_get_devices(3)`: `rdma_free_devices(3)` would give the devices back.
    lists: Vec<usize>,
}

impl KeptOpen {
    /// Keeps the list if it has contexts that no other has, and calls `new` for them. Returns
    /// whether it does.
    fn keep(&mut self, list: usize, contexts: impl Iterator<Item = usize>, new: impl Fn(usize)) -> bool {
        let before = self.contexts.len();
        for context in contexts {
            if !self.contexts.contains(&context) {
                self.contexts.push(context);
                new(context);
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
    pub(crate) fn hold(api: &'static Api, context: NonNull<ibv_context>, id: &Arc<CmId>) -> Self {
        let held = hold(api, context);
        Self { api, context, _keeper: (!held).then(|| Arc::clone(id)) }
    }

    /// Returns the context if it stays open for the rest of the process.
    pub(crate) fn held_for_ever(api: &Api, context: NonNull<ibv_context>) -> Option<NonNull<ibv_context>> {
        hold(api, context).then_some(context)
    }

    pub(crate) const fn context(&self) -> *mut ibv_context {
        self.context.as_ptr()
    }

    /// Returns the number of completion vectors, at least one.
    pub(crate) fn completion_vectors(&self) -> u32 {
        // SAFETY: the context is open; the field is never written after opening.
        let vectors = unsafe { (*self.context.as_ptr()).num_comp_vectors };
        u32::try_from(vectors).unwrap_or(1).max(1)
    }

    pub(crate) fn capabilities(&self) -> Result<Capabilities, Error> {
        let mut attributes: ibv_device_attr = sys::zeroed();
        // SAFETY: ibv_query_device(3): an open context and a live structure of the right type.
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
    pub(crate) fn gid(&self, port: u8, index: u8) -> Result<ibv_gid, Error> {
        let mut gid: ibv_gid = sys::zeroed();
        // SAFETY: ibv_query_gid(3): an open context and a live union of the right type; a port or
        // an index that the device does not have is an error.
        let result =
            unsafe { (self.api.ibv_query_gid)(self.context.as_ptr(), port, index.into(), &raw mut gid) };
        match result {
            0 => Ok(gid),
            // -1 with errno, as in the man page, or the number itself.
            -1 => Err(Error::last("ibv_query_gid", Stage::Connection)),
            result => Err(Error::returned("ibv_query_gid", result, Stage::Connection)),
        }
    }

    pub(crate) fn lid(&self, port: u8) -> Result<u16, Error> {
        let mut attributes: PortAttributes = sys::zeroed();
        // SAFETY: ibv_query_port(3): an open context; the function writes 48 bytes, and the
        // structure has 64 with the alignment of C's.
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
    let contexts =
        (0..usize::try_from(count).unwrap_or(0)).map(|index| unsafe { *list.add(index) }.expose_provenance());
    let new = |context: usize| {
        let context: *mut ibv_context = ptr::with_exposed_provenance_mut(context);
        // SAFETY: an open context of the list; the fields are never written after opening.
        let (commands, events) = unsafe { ((*context).cmd_fd, (*context).async_fd) };
        rdma_process::close_in_children(commands);
        rdma_process::close_in_children(events);
    };
    if !held.keep(list as usize, contexts, new) {
        // The device of `context` may be dead and in no list. SAFETY: rdma_free_devices(3): from
        // `rdma_get_devices`, given back once; kept lists hold each context in it open.
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
        let told = Mutex::new(Vec::new());
        let new = |context| locked(&told).push(context);
        assert!(held.keep(0x1, [10, 20].into_iter(), new));
        assert!(!held.keep(0x2, [20, 10].into_iter(), new));
        // A device was unplugged.
        assert!(!held.keep(0x3, [20].into_iter(), new));
        assert!(!held.keep(0x4, [].into_iter(), new));
        // A device was plugged in.
        assert!(held.keep(0x5, [20, 30].into_iter(), new));
        assert_eq!((held.contexts, held.lists), (vec![10, 20, 30], vec![0x1, 0x5]));
        assert_eq!(*locked(&told), [10, 20, 30]);
    }
}
