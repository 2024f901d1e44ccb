//! Which object of this process a name of the session means, for events.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use softrdma_wire::Name;

use crate::process::PerProcess;

/// Addresses of live objects. Names are never given again, so one table does for all kinds.
pub(crate) static OBJECTS: PerProcess<Mutex<BTreeMap<Name, usize>>> = PerProcess::new();

fn lock() -> MutexGuard<'static, BTreeMap<Name, usize>> {
    OBJECTS.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// `name` means what `object` points to.
pub(crate) fn enter<T>(name: Name, object: *mut T) {
    lock().insert(name, object.expose_provenance());
}

/// It means nothing any more.
pub(crate) fn leave(name: Name) {
    lock().remove(&name);
}

/// What it means, if that is still there; of the type with which it was entered.
pub(crate) fn find<T>(name: Name) -> Option<*mut T> {
    lock().get(&name).map(|object| std::ptr::with_exposed_provenance_mut(*object))
}
