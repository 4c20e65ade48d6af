/* Makes the k-th call that writes under one folder fail: loaded before libc, so that it is the program's real calls.
 *
 * cc -shared -fPIC -o faults.so faults.c -ldl;  LD_PRELOAD=./faults.so python ...;  faults_arm(folder, k, errno, lasting, half)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[4096];
static long at, seen;                /* which call fails, 0 = none; calls so far */
static int error, lasting, half;     /* what it says; whether all after it fail as well; whether it writes a half */
static __thread int inside;

void faults_arm(const char *under, long k, int number, int for_ever, int halves) {
    snprintf(folder, sizeof folder, "%s", under);
    at = k, seen = 0, error = number, lasting = for_ever, half = halves;
}
long faults_seen(void) { return seen; }

static int counts(const char *path, int dir) {
    char whole[8192];
    if (!folder[0] || inside) return 0;
    if (path && path[0] == '/') snprintf(whole, sizeof whole, "%s", path);
    else {
        char link[64], base[4096];
        ssize_t n;
        inside = 1;
        if (dir == AT_FDCWD) n = getcwd(base, sizeof base) ? (ssize_t)strlen(base) : -1;
        else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
            n = readlink(link, base, sizeof base - 1);
        }
        inside = 0;
        if (n < 0) return 0;
        base[n] = 0;
        snprintf(whole, sizeof whole, path ? "%s/%s" : "%s", base, path);
    }
    return !strncmp(whole, folder, strlen(folder));
}

enum { WAITS = 1, TAKES = 2 }; /* calls that a signal interrupts; calls that need room on the disk */

static int fails(const char *path, int dir, int kind) {
    if ((error == EINTR && !(kind & WAITS)) || (error == ENOSPC && !(kind & TAKES))) return 0;
    if (!counts(path, dir)) return 0;
    seen++;
    if (!at || !(seen == at || (lasting && seen > at))) return 0;
    errno = error;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t n) {
    if (fails(0, fd, WAITS | TAKES)) { if (half && seen == at && n > 1) return REAL(write)(fd, data, n / 2); errno = error; return -1; }
    return REAL(write)(fd, data, n);
}
#define PWRITE(name) ssize_t name(int fd, const void *data, size_t n, off_t place) { \
    if (fails(0, fd, WAITS | TAKES)) { if (half && seen == at && n > 1) return REAL(name)(fd, data, n / 2, place); errno = error; return -1; } \
    return REAL(name)(fd, data, n, place); }
PWRITE(pwrite)
PWRITE(pwrite64)
#define BY_NUMBER(name) int name(int fd) { return fails(0, fd, WAITS | TAKES) ? -1 : REAL(name)(fd); }
BY_NUMBER(fsync)
BY_NUMBER(fdatasync)
#define TRUNCATE(name) int name(int fd, off_t n) { return fails(0, fd, WAITS) ? -1 : REAL(name)(fd, n); }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)
#define CLAIM(name) int name(int fd, off_t from, off_t n) { return fails(0, fd, WAITS | TAKES) ? error : REAL(name)(fd, from, n); }
CLAIM(posix_fallocate)
CLAIM(posix_fallocate64)
int fchmod(int fd, mode_t mode) { return fails(0, fd, 0) ? -1 : REAL(fchmod)(fd, mode); }
#define MAKES(flags) (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE)
#define MODE(flags) mode_t mode = 0; if (MAKES(flags)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }
#define OPEN(name) int name(const char *path, int flags, ...) { MODE(flags) \
    return MAKES(flags) && fails(path, AT_FDCWD, WAITS | TAKES) ? -1 : REAL(name)(path, flags, mode); }
OPEN(open)
OPEN(open64)
#define OPENAT(name) int name(int dir, const char *path, int flags, ...) { MODE(flags) \
    return MAKES(flags) && fails(path, dir, WAITS | TAKES) ? -1 : REAL(name)(dir, path, flags, mode); }
OPENAT(openat)
OPENAT(openat64)
int mkdir(const char *path, mode_t mode) { return fails(path, AT_FDCWD, TAKES) ? -1 : REAL(mkdir)(path, mode); }
int rename(const char *a, const char *b) { return fails(b, AT_FDCWD, TAKES) ? -1 : REAL(rename)(a, b); }
int renameat(int from, const char *a, int to, const char *b) { return fails(b, to, TAKES) ? -1 : REAL(renameat)(from, a, to, b); }
int link(const char *a, const char *b) { return fails(b, AT_FDCWD, TAKES) ? -1 : REAL(link)(a, b); }
int linkat(int from, const char *a, int to, const char *b, int flags) { return fails(b, to, TAKES) ? -1 : REAL(linkat)(from, a, to, b, flags); }
int unlink(const char *path) { return fails(path, AT_FDCWD, 0) ? -1 : REAL(unlink)(path); }
int unlinkat(int dir, const char *path, int flags) { return fails(path, dir, 0) ? -1 : REAL(unlinkat)(dir, path, flags); }
#define MMAP(name) void *name(void *where, size_t n, int may, int flags, int fd, off_t from) { \
    return fd >= 0 && (may & PROT_WRITE) && fails(0, fd, 0) ? MAP_FAILED : REAL(name)(where, n, may, flags, fd, from); }
MMAP(mmap)
MMAP(mmap64)
