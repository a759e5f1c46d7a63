//! Which RDMA device has an IP address, as sysfs shows it.

use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

/// A port of a device, with the place of one address in its GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Name, such as `mlx5_0`.
    pub name: String,
    /// Port number, from 1.
    pub port: u8,
    /// Index in the port's GID table.
    pub gid_index: u8,
}

/// Returns the device that sends and receives RoCE v2 for an address of this machine.
#[must_use]
pub fn device_of(address: IpAddr) -> Option<Device> {
    device_below(Path::new("/sys/class/infiniband"), address)
}

fn device_below(root: &Path, address: IpAddr) -> Option<Device> {
    let gid = gid_of(address);
    // In order of names, so that each start finds the same.
    for name in names(root) {
        for port in names(&root.join(&name).join("ports")) {
            let place = root.join(&name).join("ports").join(&port);
            for index in names(&place.join("gids")) {
                let read = |path: &str| {
                    let text = fs::read_to_string(place.join(path).join(&index)).ok()?;
                    Some(text.trim().to_owned())
                };
                let is_it = read("gids").and_then(|text| text.parse().ok()) == Some(gid)
                    && read("gid_attrs/types").as_deref() == Some("RoCE v2");
                if is_it && let (Ok(port), Ok(gid_index)) = (port.parse(), index.parse()) {
                    return Some(Device { name, port, gid_index });
                }
            }
        }
    }
    None
}

/// The GID of an address: an IPv4 address is written as a mapped one (RoCE v2, annex A17).
pub(crate) fn gid_of(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

/// Names below a directory, in order, short ones first; none if it does not exist.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_by_key(|name| (name.len(), name.clone()));
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gid_of_an_address_is_found_only_as_roce_v2() {
        let root = std::env::temp_dir().join(format!("sealane-verbs-{}", std::process::id()));
        let write = |device: &str, index: u8, gid: &str, kind: &str| {
            let port = root.join(device).join("ports/1");
            for (directory, text) in [("gids", gid), ("gid_attrs/types", kind)] {
                fs::create_dir_all(port.join(directory)).unwrap();
                fs::write(port.join(directory).join(index.to_string()), format!("{text}\n"))
                    .unwrap();
            }
        };
        let mapped = "0000:0000:0000:0000:0000:ffff:0a00:0001";
        write("mlx5_0", 0, "fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1");
        write("mlx5_1", 2, mapped, "IB/RoCE v1");
        write("mlx5_1", 3, mapped, "RoCE v2");
        let found = device_below(&root, "10.0.0.1".parse().unwrap());
        assert_eq!(found, Some(Device { name: "mlx5_1".into(), port: 1, gid_index: 3 }));
        assert_eq!(device_below(&root, "10.0.0.2".parse().unwrap()), None);
        assert_eq!(device_below(&root, "fe80::1".parse().unwrap()), None, "of another kind");
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(device_below(&root, "10.0.0.1".parse().unwrap()), None, "no devices");
    }
}
