/* Faults at the k-th call of a kind: preloaded, it stands before the C library's own functions.
 *
 * Only what concerns files below one folder is counted, the standard streams, sockets, and what asks for memory or
 * threads. Nothing happens until a process says which folder (`faults_watch`) and which call (`faults_arm`).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

/* In the order of CALLS in calls.py. */
enum {
    OPEN, READ, WRITE, PRINT, INPUT, STAT, LIST, SYNC, RENAME, UNLINK, MKDIR, RESIZE, LOCK,
    ROOM, MMAP, MADVISE, THREAD, SOCKET, RECV, SEND, CREATE, CLOSE, NUM_CALLS
};
enum { NOTHING, ERROR, SHORT, SIGNAL, SLOW }; /* kinds of faults, as in calls.py */
#define ANY NUM_CALLS
#define MOST_FILES 4096
#define LEAST_MAP_BYTES 65536

static char root[PATH_MAX];
static size_t root_chars;
static char is_own[MOST_FILES];
static long counts[NUM_CALLS + 1];
static int armed_call = -1, armed_kind, is_lasting;
static long armed_at, armed_value;
static volatile char *struck;

void faults_watch(const char *folder) {
    memset(counts, 0, sizeof counts);
    strncpy(root, folder, PATH_MAX - 1);
    root_chars = strlen(root);
}

/* Where each call comes from is written there: a line with its kind and number, then Python's traceback if it has one. */
static int record = -1;
static const char *(*traceback)(int, void *);
static void *(*thread_state)(void);
void faults_record(int fd) {
    traceback = dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
    thread_state = dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    record = fd;
}
static void note(int call, long number, long of_any) {
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    void *state = traceback && thread_state ? thread_state() : NULL;
    pthread_mutex_lock(&one);
    dprintf(record, "@ %d %ld %ld\n", call, number, of_any);
    if (state) traceback(record, state);
    pthread_mutex_unlock(&one);
}

/* Becomes 1 where a child strikes: shared with the process that has forked it, for the child may be killed. */
volatile char *faults_mark(void) {
    return struck = mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

void faults_arm(int call, long at, int kind, long value, int lasting) {
    armed_at = at, armed_kind = kind, armed_value = value, is_lasting = lasting;
    armed_call = call;
}

static int due(int call) {
    if (!root_chars) return NOTHING;
    long number = __atomic_add_fetch(&counts[call], 1, __ATOMIC_SEQ_CST);
    long of_any = call == PRINT ? 0 : __atomic_add_fetch(&counts[ANY], 1, __ATOMIC_SEQ_CST);
    if (record >= 0) note(call, number, of_any);
    if (armed_call == ANY) number = of_any;
    else if (armed_call != call) return NOTHING;
    if (number != armed_at && !(is_lasting && number > armed_at)) return NOTHING;
    *struck = 1;
    if (armed_kind == SIGNAL) return kill(getpid(), (int)armed_value), NOTHING;
    if (armed_kind == SLOW) return usleep((useconds_t)armed_value), NOTHING;
    if (armed_kind == ERROR) errno = (int)armed_value;
    return armed_kind;
}

static int below(const char *path) {
    return root_chars && path && !strncmp(path, root, root_chars) && (path[root_chars] == '/' || !path[root_chars]);
}
static int own(int fd) { return fd >= 0 && fd < MOST_FILES && is_own[fd]; }
static int at(int folder, const char *path) { return below(path) || (path && path[0] != '/' && own(folder)); }
static int keep(int fd) {
    if (fd >= 0 && fd < MOST_FILES) is_own[fd] = 1;
    return fd;
}
static int opening(int flags) { return flags & O_CREAT ? CREATE : OPEN; }

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)
#define FAIL_IF(counts_here, call, failed) if ((counts_here) && due(call) == ERROR) return failed
/* Nothing at all of a request that can come in parts: half of it. */
#define HALF(n) ((n) > 1 ? (n) / 2 : (n))

#define OPENING(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...); \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        if (!below(path)) return real(path, flags, mode); \
        FAIL_IF(1, opening(flags), -1); \
        return keep(real(path, flags, mode)); \
    }
OPENING(open)
OPENING(open64)
#define OPENING_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(int, name, int, const char *, int, ...); \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        if (!at(folder, path)) return real(folder, path, flags, mode); \
        FAIL_IF(1, opening(flags), -1); \
        return keep(real(folder, path, flags, mode)); \
    }
OPENING_AT(openat)
OPENING_AT(openat64)

int close(int fd) {
    REAL(int, close, int);
    int is_failing = own(fd) && due(CLOSE) == ERROR, error = errno;
    if (fd >= 0 && fd < MOST_FILES) is_own[fd] = 0;
    int done = real(fd); /* it is closed all the same, as Linux does it */
    return is_failing ? errno = error, -1 : done;
}
#define FOPENING(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(FILE *, name, const char *, const char *); \
        FAIL_IF(below(path), *mode == 'r' ? OPEN : CREATE, NULL); \
        return real(path, mode); \
    }
FOPENING(fopen)
FOPENING(fopen64)

static int read_call(int fd) { return own(fd) ? READ : fd == 0 ? INPUT : -1; }
static int write_call(int fd) { return own(fd) ? WRITE : fd == 1 ? PRINT : -1; }
#define MOVE(call, n) \
    if ((call) >= 0 && root_chars) { \
        int fault = due(call); \
        if (fault == ERROR) return -1; \
        if (fault == SHORT) n = HALF(n); \
    }
ssize_t read(int fd, void *to, size_t n) {
    REAL(ssize_t, read, int, void *, size_t);
    int call = read_call(fd);
    MOVE(call, n)
    return real(fd, to, n);
}
ssize_t write(int fd, const void *from, size_t n) {
    REAL(ssize_t, write, int, const void *, size_t);
    int call = write_call(fd);
    MOVE(call, n)
    return real(fd, from, n);
}
#define PREAD(name) \
    ssize_t name(int fd, void *to, size_t n, off64_t offset) { \
        REAL(ssize_t, name, int, void *, size_t, off64_t); \
        int call = own(fd) ? READ : -1; \
        MOVE(call, n) \
        return real(fd, to, n, offset); \
    }
PREAD(pread)
PREAD(pread64)
#define PWRITE(name) \
    ssize_t name(int fd, const void *from, size_t n, off64_t offset) { \
        REAL(ssize_t, name, int, const void *, size_t, off64_t); \
        int call = own(fd) ? WRITE : -1; \
        MOVE(call, n) \
        return real(fd, from, n, offset); \
    }
PWRITE(pwrite)
PWRITE(pwrite64)
/* A vector is cut to half of its first buffer, in whole blocks where there are any. */
static size_t cut(struct iovec *half, const struct iovec *whole) {
    *half = *whole;
    half->iov_len = half->iov_len >= 8192 ? half->iov_len / 2 / 4096 * 4096 : HALF(half->iov_len);
    return 1;
}
#define VECTOR(name, call_number) \
    ssize_t name(int fd, const struct iovec *parts, int n, off64_t offset) { \
        REAL(ssize_t, name, int, const struct iovec *, int, off64_t); \
        struct iovec half; \
        if (own(fd)) { \
            int fault = due(call_number); \
            if (fault == ERROR) return -1; \
            if (fault == SHORT) return real(fd, &half, (int)cut(&half, parts), offset); \
        } \
        return real(fd, parts, n, offset); \
    }
VECTOR(preadv, READ)
VECTOR(preadv64, READ)
VECTOR(pwritev, WRITE)
VECTOR(pwritev64, WRITE)
#define VECTOR2(name, call_number) \
    ssize_t name(int fd, const struct iovec *parts, int n, off64_t offset, int flags) { \
        REAL(ssize_t, name, int, const struct iovec *, int, off64_t, int); \
        struct iovec half; \
        if (own(fd)) { \
            int fault = due(call_number); \
            if (fault == ERROR) return -1; \
            if (fault == SHORT) return real(fd, &half, (int)cut(&half, parts), offset, flags); \
        } \
        return real(fd, parts, n, offset, flags); \
    }
VECTOR2(preadv2, READ)
VECTOR2(preadv64v2, READ)
VECTOR2(pwritev2, WRITE)
VECTOR2(pwritev64v2, WRITE)
ssize_t writev(int fd, const struct iovec *parts, int n) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    FAIL_IF(own(fd), WRITE, -1);
    return real(fd, parts, n);
}
#define COPYING(name) \
    ssize_t name(int to, int from, off64_t *at, size_t n) { \
        REAL(ssize_t, name, int, int, off64_t *, size_t); \
        int call = write_call(to); \
        MOVE(call, n) \
        return real(to, from, at, n); \
    }
COPYING(sendfile)
COPYING(sendfile64)
ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *to_at, size_t n, unsigned flags) {
    REAL(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned);
    int call = write_call(to);
    MOVE(call, n)
    return real(from, at, to, to_at, n, flags);
}

#define STATING(name, kind) \
    int name(const char *path, struct kind *to) { \
        REAL(int, name, const char *, struct kind *); \
        FAIL_IF(below(path), STAT, -1); \
        return real(path, to); \
    }
STATING(stat, stat)
STATING(stat64, stat64)
STATING(lstat, stat)
STATING(lstat64, stat64)
#define FSTATING(name, kind) \
    int name(int fd, struct kind *to) { \
        REAL(int, name, int, struct kind *); \
        FAIL_IF(own(fd), STAT, -1); \
        return real(fd, to); \
    }
FSTATING(fstat, stat)
FSTATING(fstat64, stat64)
#define FSTATING_AT(name, kind) \
    int name(int folder, const char *path, struct kind *to, int flags) { \
        REAL(int, name, int, const char *, struct kind *, int); \
        FAIL_IF(at(folder, path), STAT, -1); \
        return real(folder, path, to, flags); \
    }
FSTATING_AT(fstatat, stat)
FSTATING_AT(fstatat64, stat64)
int statx(int folder, const char *path, int flags, unsigned mask, struct statx *to) {
    REAL(int, statx, int, const char *, int, unsigned, struct statx *);
    FAIL_IF(at(folder, path) || own(folder), STAT, -1);
    return real(folder, path, flags, mask, to);
}
int access(const char *path, int mode) {
    REAL(int, access, const char *, int);
    FAIL_IF(below(path), STAT, -1);
    return real(path, mode);
}
#define VFS(name, kind) \
    int name(const char *path, struct kind *to) { \
        REAL(int, name, const char *, struct kind *); \
        FAIL_IF(below(path), ROOM, -1); \
        return real(path, to); \
    }
VFS(statvfs, statvfs)
VFS(statvfs64, statvfs64)

DIR *opendir(const char *path) {
    REAL(DIR *, opendir, const char *);
    FAIL_IF(below(path), LIST, NULL);
    return real(path);
}
DIR *fdopendir(int fd) {
    REAL(DIR *, fdopendir, int);
    FAIL_IF(own(fd), LIST, NULL);
    return real(fd);
}
int fsync(int fd) {
    REAL(int, fsync, int);
    FAIL_IF(own(fd), SYNC, -1);
    return real(fd);
}
int fdatasync(int fd) {
    REAL(int, fdatasync, int);
    FAIL_IF(own(fd), SYNC, -1);
    return real(fd);
}
int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    FAIL_IF(below(from), RENAME, -1);
    return real(from, to);
}
int renameat(int folder, const char *from, int other, const char *to) {
    REAL(int, renameat, int, const char *, int, const char *);
    FAIL_IF(at(folder, from), RENAME, -1);
    return real(folder, from, other, to);
}
int unlink(const char *path) {
    REAL(int, unlink, const char *);
    FAIL_IF(below(path), UNLINK, -1);
    return real(path);
}
int unlinkat(int folder, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    FAIL_IF(at(folder, path), UNLINK, -1);
    return real(folder, path, flags);
}
int rmdir(const char *path) {
    REAL(int, rmdir, const char *);
    FAIL_IF(below(path), UNLINK, -1);
    return real(path);
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    FAIL_IF(below(path), MKDIR, -1);
    return real(path, mode);
}
#define RESIZING(name) \
    int name(int fd, off64_t size) { \
        REAL(int, name, int, off64_t); \
        FAIL_IF(own(fd), RESIZE, -1); \
        return real(fd, size); \
    }
RESIZING(ftruncate)
RESIZING(ftruncate64)
#define RESERVING(name) \
    int name(int fd, off64_t offset, off64_t size) { \
        REAL(int, name, int, off64_t, off64_t); \
        if (own(fd) && due(RESIZE) == ERROR) return errno; \
        return real(fd, offset, size); \
    }
RESERVING(posix_fallocate)
RESERVING(posix_fallocate64)
#define ADVISING(name) \
    int name(int fd, off64_t offset, off64_t size, int advice) { \
        REAL(int, name, int, off64_t, off64_t, int); \
        if (own(fd) && due(MADVISE) == ERROR) return errno; \
        return real(fd, offset, size, advice); \
    }
ADVISING(posix_fadvise)
ADVISING(posix_fadvise64)
int flock(int fd, int operation) {
    REAL(int, flock, int, int);
    FAIL_IF(own(fd), LOCK, -1);
    return real(fd, operation);
}
#define MAPPING(name) \
    void *name(void *where, size_t size, int protection, int flags, int fd, off64_t offset) { \
        REAL(void *, name, void *, size_t, int, int, int, off64_t); \
        FAIL_IF(own(fd) || (fd == -1 && size >= LEAST_MAP_BYTES), MMAP, MAP_FAILED); \
        return real(where, size, protection, flags, fd, offset); \
    }
MAPPING(mmap)
MAPPING(mmap64)
int madvise(void *where, size_t size, int advice) {
    REAL(int, madvise, void *, size_t, int);
    FAIL_IF(1, MADVISE, -1);
    return real(where, size, advice);
}
int pthread_create(pthread_t *id, const pthread_attr_t *how, void *(*work)(void *), void *with) {
    REAL(int, pthread_create, pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (due(THREAD) == ERROR) return EAGAIN;
    return real(id, how, work, with);
}

int socket(int domain, int type, int protocol) {
    REAL(int, socket, int, int, int);
    FAIL_IF(1, SOCKET, -1);
    return real(domain, type, protocol);
}
int bind(int fd, const struct sockaddr *address, socklen_t size) {
    REAL(int, bind, int, const struct sockaddr *, socklen_t);
    FAIL_IF(1, SOCKET, -1);
    return real(fd, address, size);
}
int listen(int fd, int backlog) {
    REAL(int, listen, int, int);
    FAIL_IF(1, SOCKET, -1);
    return real(fd, backlog);
}
int accept4(int fd, struct sockaddr *address, socklen_t *size, int flags) {
    REAL(int, accept4, int, struct sockaddr *, socklen_t *, int);
    FAIL_IF(1, SOCKET, -1);
    return real(fd, address, size, flags);
}
ssize_t recv(int fd, void *to, size_t n, int flags) {
    REAL(ssize_t, recv, int, void *, size_t, int);
    MOVE(RECV, n)
    return real(fd, to, n, flags);
}
ssize_t send(int fd, const void *from, size_t n, int flags) {
    REAL(ssize_t, send, int, const void *, size_t, int);
    MOVE(SEND, n)
    return real(fd, from, n, flags);
}
