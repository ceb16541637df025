/* Moves the wall clock that one program reads; the machine's clock stays. Preloaded by wall_clock.py.

   The seconds to add are the integer in the file $GSPLIT_WALL_CLOCK, which another process may change at any moment.
   Moved are the calls that read the wall clock, and the waits until a time of it, which the kernel would otherwise
   end by its own clock. A deadline of the monotonic clock is told by its size: seconds since the start of the machine.
   Not moved: times of files, timers (timerfd, setitimer) and sleeps until a time of the wall clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define WALL_CLOCK_S 1000000000 /* no machine has been up for so long */

static volatile const int64_t *moved_s;

__attribute__((constructor)) static void map_moved_seconds(void) {
    const char *name = getenv("GSPLIT_WALL_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof *moved_s, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) moved_s = page;
    close(file);
}

static int64_t moved(void) { return moved_s ? *moved_s : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += moved();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *seconds) {
    struct timespec precise;
    if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
    if (seconds) *seconds = precise.tv_sec;
    return precise.tv_sec;
}

static clockid_t to_kernel(const struct timespec *deadline, struct timespec *kernel) {
    *kernel = *deadline;
    if (deadline->tv_sec < WALL_CLOCK_S) return CLOCK_MONOTONIC;
    kernel->tv_sec -= moved();
    return CLOCK_REALTIME;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
    struct timespec kernel;
    clockid_t clock = to_kernel(deadline, &kernel);
    return pthread_cond_clockwait(condition, mutex, clock, &kernel);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *deadline) {
    struct timespec kernel;
    clockid_t clock = to_kernel(deadline, &kernel);
    return pthread_mutex_clocklock(mutex, clock, &kernel);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    struct timespec kernel;
    clockid_t clock = to_kernel(deadline, &kernel);
    return sem_clockwait(semaphore, clock, &kernel);
}
