package plugin

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
)

// A seal is what the kernel tells of a file that was hashed, or of a folder whose names were
// checked. Whoever writes to it, or puts another in its place, changes the seal: nobody but the
// kernel sets ctime.
type seal struct {
	path         string
	dev, ino     uint64
	size         int64
	mtime, ctime syscall.Timespec
}

func newSeal(path string, info fs.FileInfo) (seal, error) {
	at, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return seal{}, errors.New("the system does not tell one file from another")
	}
	return seal{path, at.Dev, at.Ino, at.Size, at.Mtim, at.Ctim}, nil
}

// holds reports whether what lies at the path is still what was sealed.
func (s seal) holds() bool {
	info, err := os.Stat(s.path)
	if err != nil {
		return false
	}
	now, err := newSeal(s.path, info)
	return err == nil && now == s
}

// Unchanged tells whether the files are those that Open has hashed, and no other has been added.
// Libraries and tools that an engine opens as it works are covered by asking afterwards.
func (b *Bundle) Unchanged() error {
	for _, s := range b.seals {
		if !s.holds() {
			return b.untrusted(s.path, "was changed after it was verified")
		}
	}
	return nil
}

// Loaded tells whether what this process has loaded are the files that Open has hashed. Foreign
// code may have run by then, so that after an error nothing of the engine must be used.
func (b *Bundle) Loaded() error {
	if err := b.Unchanged(); err != nil {
		return err
	}
	for _, path := range append([]string{b.Plugin}, b.Preload...) {
		if ok, err := mapped(path); err != nil {
			return b.untrusted(path, "cannot be compared with what was loaded").Wrap(err)
		} else if !ok {
			return b.untrusted(path, "is not the file that was loaded")
		}
	}
	return b.Unchanged() // the look itself took the files by their names
}

func (b *Bundle) untrusted(path, what string) *diag.Error {
	return diag.New(diag.EngineUntrusted, "%s of engine %q %s", filepath.Base(path), b.Name, what).
		At("%s", path).Try("deepwell engine install %s", b.Name)
}

// mapped reports whether the process has mapped the file at path as code. The file is mapped once
// more, for reading, and the two are compared: overlay file systems show another device and inode
// in a process's maps than stat does.
func mapped(path string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	page, err := unix.Mmap(int(f.Fd()), 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return false, err
	}
	defer func() { _ = unix.Munmap(page) }()
	ours := strings.TrimPrefix(fmt.Sprintf("%p", page), "0x")
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return false, err
	}
	defer maps.Close()
	own, code := "", map[string]bool{} // by device and inode
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		// address-address perms offset device inode path
		fields := strings.Fields(lines.Text())
		if len(fields) < 5 {
			continue
		}
		file := fields[3] + " " + fields[4]
		if from, _, _ := strings.Cut(fields[0], "-"); strings.TrimLeft(from, "0") == ours {
			own = file
		}
		code[file] = code[file] || strings.Contains(fields[1], "x")
	}
	if own == "" {
		return false, errors.New("the process's own maps do not show a file that it has mapped")
	}
	return code[own], nil
}

// checkOwners wants the engines' folder, and everything in an engine's, to belong to the user or to
// root, and nobody else to be able to write there: sshd asks the same of its keys. Folders further
// up are not looked at: what others can do there is to put a folder of their own in its place, and
// that is refused as theirs.
func checkOwners(dir, folder string) error {
	if err := checkRoot(dir); err != nil {
		return err
	}
	return filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return diag.New(diag.FileError, "cannot read the engine folder").At("%s", path).Wrap(err)
		}
		info, err := d.Info()
		if err != nil {
			return diag.New(diag.FileError, "cannot read the engine folder").At("%s", path).Wrap(err)
		}
		return exposed(path, info)
	})
}

// checkRoot is checkOwners of the engines' folder alone, which may be a link.
func checkRoot(dir string) error {
	info, err := os.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return diag.New(diag.FileError, "cannot read the engine folder").At("%s", dir).Wrap(err)
	}
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	return exposed(dir, info)
}

// exposed says who else could change a file or folder, if anyone.
func exposed(path string, info fs.FileInfo) error {
	at, ok := info.Sys().(*syscall.Stat_t)
	if !ok || info.Mode()&fs.ModeSymlink != 0 {
		return nil // a link is refused for what it is
	}
	refused := func(what string) *diag.Error {
		return diag.New(diag.EngineExposed, "%s %s", path, what).
			Because("owner %s, mode %04o: whoever can write there can run code as you", owner(at.Uid),
				info.Mode().Perm())
	}
	if at.Uid != 0 && int64(at.Uid) != int64(os.Geteuid()) {
		return refused("belongs to another user").
			Try("sudo chown -R root %s, or set DEEPWELL_HOME to a folder of your own and install there",
				path)
	}
	if info.Mode().Perm()&0o022 != 0 {
		return refused("can be written by others").Try("chmod -R go-w %s", path)
	}
	return nil
}

// owner gives the name of a user, or the number.
func owner(uid uint32) string {
	id := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(id); err == nil {
		return u.Username
	}
	return id
}
