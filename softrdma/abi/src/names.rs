//! Finds the object of this process that an event's name stands for.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use softrdma_wire::Name;

use crate::process::PerProcess;

/// Addresses of live objects. The fabric never reuses a name, so one table serves all kinds.
pub(crate) static OBJECTS: PerProcess<Mutex<BTreeMap<Name, usize>>> = PerProcess::new();

fn lock() -> MutexGuard<'static, BTreeMap<Name, usize>> {
    OBJECTS.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn enter<T>(name: Name, object: *mut T) {
    lock().insert(name, object.expose_provenance());
}

pub(crate) fn leave(name: Name) {
    lock().remove(&name);
}

/// Shows `look` the object with this name, and returns it; `None` if it is gone.
///
/// `look` runs under the table's lock. A thread that destroys the object removes its name first, so
/// the object outlives `look`, and after that as long as its destruction waits for what `look`
/// counted.
pub(crate) fn find_with<T>(name: Name, look: impl FnOnce(*mut T)) -> Option<*mut T> {
    let objects = lock();
    let object = std::ptr::with_exposed_provenance_mut(*objects.get(&name)?);
    look(object);
    Some(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_keeps_its_name_while_it_is_looked_at() {
        let object = Box::into_raw(Box::new(7));
        enter(1, object);
        let mut seen = None;
        let found = find_with(1, |object: *mut i32| {
            assert!(OBJECTS.get(Mutex::default).try_lock().is_err(), "`leave` would not wait");
            // SAFETY: it is freed below.
            seen = Some(unsafe { *object });
        });
        assert_eq!((found, seen), (Some(object), Some(7)));
        leave(1);
        assert_eq!(find_with(1, |_: *mut i32| unreachable!("it is gone")), None);
        // SAFETY: made above.
        drop(unsafe { Box::from_raw(object) });
    }
}
