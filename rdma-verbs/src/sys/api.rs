//! The table of C functions.

use core::ffi::{c_int, c_uint, c_void};

use libc::sockaddr;

use super::{
    _compat_ibv_port_attr, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device_attr, ibv_gid,
    ibv_mr, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, rdma_cm_event, rdma_cm_id, rdma_conn_param,
    rdma_event_channel,
};
use crate::error::Error;

/// The library that is opened; the dynamic linker finds libibverbs through it.
#[cfg(any(not(feature = "rdma-sys"), test))]
const RDMACM: &str = "librdmacm.so.1";
/// Where verbs are looked up if the first library does not lead to them.
#[cfg(any(not(feature = "rdma-sys"), test))]
const IBVERBS: &str = "libibverbs.so.1";

pub(crate) type RegisterOptionally =
    unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;

#[cfg(not(feature = "rdma-sys"))]
const _: RegisterOptionally = super::generated::ibv_reg_mr_iova2;

macro_rules! api {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        pub(crate) struct Api {
            $($(#[$attribute])* pub(crate) $name: unsafe extern "C" fn($($argument: $type),*) $(-> $result)?,)*
            /// What the headers' `ibv_reg_mr` calls for optional rights: it leaves out those that
            /// the kernel does not know. Since rdma-core 28.
            pub(crate) ibv_reg_mr_iova2: Option<RegisterOptionally>,
        }

        // Compares the prototypes with the generated declarations. It emits nothing to link.
        #[cfg(not(feature = "rdma-sys"))]
        const _: () = {
            $(let _: unsafe extern "C" fn($($type),*) $(-> $result)? = super::generated::$name;)*
        };

        #[cfg(any(not(feature = "rdma-sys"), test))]
        impl Api {
            pub(crate) fn open(rdmacm: &'static str, ibverbs: &'static str) -> Result<Self, Error> {
                let libraries = Libraries::open(rdmacm, ibverbs)?;
                let api = Self {
                    $($name: {
                        type Function = unsafe extern "C" fn($($type),*) $(-> $result)?;
                        // SAFETY: `Function` is the C prototype, compared with the header's.
                        unsafe { libraries.find::<Function>(stringify!($name)) }?
                    },)*
                    // SAFETY: as above.
                    ibv_reg_mr_iova2: unsafe { libraries.find("ibv_reg_mr_iova2") }.ok(),
                };
                libraries.keep();
                Ok(api)
            }
        }

        #[cfg(feature = "rdma-sys")]
        impl Api {
            const LINKED: Self = Self {
                $($name: super::functions::$name,)*
                ibv_reg_mr_iova2: Some(super::functions::ibv_reg_mr_iova2),
            };
        }
    };
}

api! {
    fn rdma_create_event_channel() -> *mut rdma_event_channel;
    fn rdma_destroy_event_channel(channel: *mut rdma_event_channel);
    fn rdma_get_cm_event(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> c_int;
    fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int;
    fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context;
    fn rdma_free_devices(list: *mut *mut ibv_context);

    fn rdma_create_id(
        channel: *mut rdma_event_channel,
        id: *mut *mut rdma_cm_id,
        context: *mut c_void,
        space: c_uint,
    ) -> c_int;
    fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int;
    fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int;
    fn rdma_set_option(
        id: *mut rdma_cm_id,
        level: c_int,
        name: c_int,
        value: *mut c_void,
        len: usize,
    ) -> c_int;
    fn rdma_bind_addr(id: *mut rdma_cm_id, address: *mut sockaddr) -> c_int;
    fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int;
    fn rdma_resolve_addr(
        id: *mut rdma_cm_id,
        source: *mut sockaddr,
        destination: *mut sockaddr,
        timeout_ms: c_int,
    ) -> c_int;
    fn rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int;
    fn rdma_create_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, attributes: *mut ibv_qp_init_attr) -> c_int;
    fn rdma_destroy_qp(id: *mut rdma_cm_id);
    fn rdma_connect(id: *mut rdma_cm_id, parameters: *mut rdma_conn_param) -> c_int;
    fn rdma_accept(id: *mut rdma_cm_id, parameters: *mut rdma_conn_param) -> c_int;
    fn rdma_reject(id: *mut rdma_cm_id, private_data: *const c_void, len: u8) -> c_int;
    fn rdma_notify(id: *mut rdma_cm_id, event: c_uint) -> c_int;
    fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int;

    fn ibv_query_device(context: *mut ibv_context, attributes: *mut ibv_device_attr) -> c_int;
    fn ibv_query_port(
        context: *mut ibv_context,
        port: u8,
        attributes: *mut _compat_ibv_port_attr,
    ) -> c_int;
    fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int;
    fn ibv_query_qp(
        qp: *mut ibv_qp,
        attributes: *mut ibv_qp_attr,
        mask: c_int,
        init: *mut ibv_qp_init_attr,
    ) -> c_int;
    fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int;
    fn ibv_reg_mr(pd: *mut ibv_pd, address: *mut c_void, len: usize, access: c_int) -> *mut ibv_mr;
    fn ibv_reg_dmabuf_mr(
        pd: *mut ibv_pd,
        offset: u64,
        len: usize,
        iova: u64,
        fd: c_int,
        access: c_int,
    ) -> *mut ibv_mr;
    fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
    fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    fn ibv_create_cq(
        context: *mut ibv_context,
        depth: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        vector: c_int,
    ) -> *mut ibv_cq;
    fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
    fn ibv_get_cq_event(
        channel: *mut ibv_comp_channel,
        cq: *mut *mut ibv_cq,
        cq_context: *mut *mut c_void,
    ) -> c_int;
    fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint);
    fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;
    fn ibv_ack_async_event(event: *mut ibv_async_event);
    fn ibv_modify_qp(qp: *mut ibv_qp, attributes: *mut ibv_qp_attr, mask: c_int) -> c_int;
}

impl Api {
    /// Loads the table once; the first success is kept for ever.
    #[cfg(not(feature = "rdma-sys"))]
    pub(crate) fn get() -> Result<&'static Self, Error> {
        static API: std::sync::OnceLock<Api> = std::sync::OnceLock::new();
        if let Some(api) = API.get() {
            return Ok(api);
        }
        let api = Self::open(RDMACM, IBVERBS)?;
        Ok(API.get_or_init(|| api))
    }

    #[cfg(feature = "rdma-sys")]
    pub(crate) fn get() -> Result<&'static Self, Error> {
        static API: Api = Api::LINKED;
        Ok(&API)
    }
}

impl core::fmt::Debug for Api {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Api").finish_non_exhaustive()
    }
}

#[cfg(any(not(feature = "rdma-sys"), test))]
struct Libraries {
    rdmacm: (&'static str, libloading::Library),
    /// Opened only if a symbol is not found through the first.
    ibverbs: (&'static str, std::cell::OnceCell<libloading::Library>),
}

#[cfg(any(not(feature = "rdma-sys"), test))]
impl Libraries {
    fn open(rdmacm: &'static str, ibverbs: &'static str) -> Result<Self, Error> {
        Ok(Self { rdmacm: (rdmacm, library(rdmacm)?), ibverbs: (ibverbs, std::cell::OnceCell::new()) })
    }

    /// # Safety
    /// `Function` is a function pointer type with the prototype of the C function.
    unsafe fn find<Function: Copy>(&self, name: &'static str) -> Result<Function, Error> {
        // SAFETY: passed on from the caller.
        if let Ok(function) = unsafe { self.rdmacm.1.get::<Function>(name) } {
            return Ok(*function);
        }
        let (file, cell) = &self.ibverbs;
        let ibverbs = match cell.get() {
            Some(ibverbs) => ibverbs,
            None => {
                let opened = library(file)?;
                cell.get_or_init(|| opened)
            }
        };
        // SAFETY: passed on from the caller.
        match unsafe { ibverbs.get::<Function>(name) } {
            Ok(function) => Ok(*function),
            Err(_) => Err(Error::Symbol { symbol: name }),
        }
    }

    /// Stays loaded: the table points into it; providers start threads and register exit handlers.
    fn keep(self) {
        std::mem::forget(self.rdmacm.1);
        std::mem::forget(self.ibverbs.1);
    }
}

#[cfg(any(not(feature = "rdma-sys"), test))]
fn library(name: &'static str) -> Result<libloading::Library, Error> {
    // SAFETY: the libraries' initialisers set up locks and lists of their own, and expect nothing.
    unsafe { libloading::Library::new(name) }
        .map_err(|error| Error::Library { library: name, reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use rdma_backend::{ErrorKind, Failure};

    use super::*;

    #[test]
    fn a_missing_library_is_an_ordinary_error_that_says_what_to_install() {
        let error = Api::open("librdmacm-that-is-not-installed.so.1", IBVERBS).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoDevice);
        let text = error.to_string();
        for part in ["librdmacm-that-is-not-installed.so.1", "apt install", "librdmacm1", "dnf install"] {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
    }

    #[test]
    fn a_library_without_the_symbols_leads_to_the_second() {
        // The C library exists everywhere and has none of the functions.
        let error = Api::open("libc.so.6", "libibverbs-that-is-not-installed.so.1").unwrap_err();
        assert!(error.to_string().contains("libibverbs-that-is-not-installed.so.1"), "{error}");
        let error = Api::open("libc.so.6", "libc.so.6").unwrap_err();
        assert!(matches!(error, Error::Symbol { symbol: "rdma_create_event_channel" }), "{error}");
        assert_eq!(error.kind(), ErrorKind::NoDevice);
    }

    #[test]
    fn the_real_libraries_have_every_symbol() {
        match Api::open(RDMACM, IBVERBS) {
            Ok(_) => {}
            Err(error @ Error::Library { .. }) => println!("skipped: {error}"),
            Err(error) => panic!("{error}"),
        }
    }
}
