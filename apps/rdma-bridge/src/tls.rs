use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::error::Error;

/// PEM files with certificates.
#[derive(Clone, Debug, Default)]
pub struct TlsFiles {
    /// The certificate chain shown to clients of `tls://`, with its private key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The authorities that must have signed the certificate of a server behind `tls://`.
    pub authorities: Option<PathBuf>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct TlsConfig {
    pub(crate) server: Option<Arc<ServerConfig>>,
    pub(crate) client: Option<Arc<ClientConfig>>,
}

impl TlsFiles {
    pub(crate) fn load(&self) -> Result<TlsConfig, Error> {
        let provider = Arc::new(rustls_graviola::default_provider());
        let server = match &self.identity {
            None => None,
            Some((chain, key)) => {
                let refused = |error: rustls::Error| unusable(chain, &error);
                let private = PrivateKeyDer::from_pem_file(key).map_err(|error| unusable(key, &error))?;
                let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
                    .with_safe_default_protocol_versions()
                    .map_err(refused)?
                    .with_no_client_auth()
                    .with_single_cert(certificates(chain)?, private)
                    .map_err(refused)?;
                Some(Arc::new(config))
            }
        };
        let client = match &self.authorities {
            None => None,
            Some(file) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates(file)? {
                    roots.add(certificate).map_err(|error| unusable(file, &error))?;
                }
                let config = ClientConfig::builder_with_provider(provider)
                    .with_safe_default_protocol_versions()
                    .map_err(|error| unusable(file, &error))?
                    .with_root_certificates(roots)
                    .with_no_client_auth();
                Some(Arc::new(config))
            }
        };
        Ok(TlsConfig { server, client })
    }
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let read = || CertificateDer::pem_file_iter(file)?.collect::<Result<Vec<_>, _>>();
    match read() {
        Ok(none) if none.is_empty() => {
            Err(Error::Pem { path: file.into(), reason: "it has no certificate".into() })
        }
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(unusable(file, &error)),
    }
}

fn unusable(file: &Path, error: &dyn std::error::Error) -> Error {
    Error::Pem { path: file.into(), reason: error.to_string() }
}
